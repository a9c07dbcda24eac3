# What type checkers read in place of __init__.py, which loads these names when they are first used.
from gpukit.course import exercise as exercise
from gpukit.course import use as use
from gpukit.grading.judge import check as check
from gpukit.grading.judge import hint as hint
from gpukit.huggingface.patching import patch as patch
from gpukit.huggingface.patching import unpatch as unpatch
from gpukit.side_by_side import compare as compare
from gpukit.simulator.compiler.compile import compile as compile
from gpukit.simulator.prediction.predict import predict as predict
from gpukit.simulator.trace.tracer import trace as trace

__version__: str
