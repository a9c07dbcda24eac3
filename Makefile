# `make lab` opens the course, `make test` runs every test, `make prove` runs the notebooks on the
# solutions and tries every known answer on the checks, all mutants of the plain functions and every tenth
# of the kernels'; each sets up .venv first where that is needed.
# PYTHON=python3.12 names a Python, VENV=.venv-other another environment, ARGS="--port 9000" is passed on.
VENV = .venv
BIN = "$(VENV)"/bin
PYTHONS = $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11)
# pyproject.toml's requires-python (tests/test_setup.py compares them).
SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# Besides the version in constraints.txt, the kernels are tested on the oldest and the newest that work.
TRITONS = 3.6.0 3.9.0
TRITON_TESTS = tests/simulator/test_interpreter.py tests/simulator/test_trace.py tests/kernels/test_softmax.py tests/checks/test_answers.py

define SETUP
@for python in $(PYTHONS) ""; do "$$python" -c '$(SUPPORTED)' 2>/dev/null && break; done; \
if [ -z "$$python" ]; then \
  echo "gpukit needs Python 3.11, 3.12 or 3.13, which is none of these:" $(PYTHONS)". Install one, or name it: make PYTHON=/path/to/python3.12"; \
  exit 1; \
fi; \
"$$python" -I gpukit/bootstrap.py --venv "$(VENV)"
endef

.PHONY: lab test prove test-gpu test-triton grade measure clean

lab:
	$(SETUP) --last-step "starting JupyterLab"
	@$(BIN)/gpukit lab $(ARGS)

test:
	$(SETUP) --extra dev --last-step "running the tests"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/gpukit nb clean --check
	$(BIN)/python -m pytest tests -n 2 --dist worksteal --durations=15 $(ARGS)

prove:
	$(SETUP) --extra dev --last-step "proving the checks"
	$(BIN)/python -m pytest --nbval notebooks --gpukit-impl=solutions --gpukit-seed=1 -n 2
	$(BIN)/gpukit integrity --jobs 2 --seeds 3 --mutants some

test-gpu:
	$(SETUP) --extra dev --last-step "running the tests that need a GPU"
	$(BIN)/python -m pytest -m gpu tests -n 8 --dist loadgroup --durations=25 $(ARGS)

test-triton:
	$(SETUP) --extra dev --last-step "running the kernels on Triton $(TRITONS)"
	@for version in $(TRITONS); do \
	  packages="$(CURDIR)/build/triton-$$version"; \
	  test -d "$$packages" || $(BIN)/python -m pip install --quiet --no-deps --target "$$packages" "triton==$$version" || exit 1; \
	  echo "Triton $$version"; \
	  PYTHONPATH="$$packages" $(BIN)/python -m pytest $(TRITON_TESTS) $(ARGS) || exit 1; \
	done

grade:
	$(SETUP) --last-step "grading exercises/"
	@$(BIN)/gpukit grade $(ARGS)

measure:
	$(SETUP) --extra dev --last-step "measuring"
	@$(BIN)/python -m tests.measure $(ARGS)

clean:
	rm -rf "$(VENV)" build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
