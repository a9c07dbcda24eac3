# Each target sets up .venv first where that is needed. PYTHON=python3.12 names a Python, VENV=.venv-other another
# environment, ARGS="--port 9000" is passed on. A comment behind ## is what `make help` prints.
.DEFAULT_GOAL := help
VENV = .venv
BIN = "$(VENV)"/bin
PYTHONS = $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11)
# pyproject.toml's requires-python (tests/test_setup.py compares them).
SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# Of plugins only what the tests use: pytest rewrites each file of a plugin that is found by itself, all of gpukit among them.
# Tests start Python hundreds of times, and so do not compile it anew each time.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --disable-plugin-autoload -p xdist
# Besides the version in constraints.txt, the kernels are tested on the oldest and the newest that work.
TRITONS = 3.6.0 3.9.0
TRITON_TESTS = tests/simulator/test_interpreter.py tests/simulator/test_gluon.py tests/simulator/test_trace.py tests/kernels/test_softmax.py tests/checks/test_answers.py

define SETUP
@for python in $(PYTHONS) ""; do "$$python" -c '$(SUPPORTED)' 2>/dev/null && break; done; \
if [ -z "$$python" ]; then \
  echo "gpukit needs Python 3.11, 3.12 or 3.13, which is none of these:" $(PYTHONS)". Install one, or name it: make PYTHON=/path/to/python3.12"; \
  exit 1; \
fi; \
"$$python" -I gpukit/bootstrap.py --venv "$(VENV)"
endef

.PHONY: help lab test prove test-gpu soak test-triton grade book measure clean

help: ## print this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\): ## \(.*\)/  \1 \2/p' Makefile | while read -r target what; do printf '  %-12s %s\n' "$$target" "$$what"; done

lab: ## open the course in JupyterLab; the first time, install it
	$(SETUP) --last-step "starting JupyterLab"
	@$(BIN)/gpukit lab $(ARGS)

# Three processes for two cores: often one of them waits for a browser, a time limit or a process that it started.
test: ## run every test, the saved notebooks included
	$(SETUP) --extra dev --last-step "running the tests"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/gpukit nb clean --check
	$(PYTEST) -m "not prove" tests -n 3 --dist worksteal --durations=15 $(ARGS)

prove: ## run notebooks on the solutions, known answers on the checks
	$(SETUP) --extra dev --last-step "proving the checks"
	$(BIN)/python -m pytest --nbval notebooks --gpukit-impl=solutions --gpukit-seed=1 -n 2
	$(PYTEST) -m prove tests -n 2
	$(BIN)/python -W error::UserWarning -m tests.train.ranks memory memory_in_bf16 traffic
	$(BIN)/python -m tests.classroom.proved -j 2
	$(BIN)/gpukit integrity --jobs 2 --seeds 3 --mutants some

test-gpu: ## run the tests that need a GPU
	$(SETUP) --extra dev --last-step "running the tests that need a GPU"
	$(PYTEST) -m gpu tests -n 8 --dist loadgroup --durations=25 $(ARGS)

soak: ## train thousands of steps on a GPU, beside PyTorch
	$(SETUP) --extra dev --last-step "training beside PyTorch"
	$(BIN)/python -m tests.train.soak $(ARGS)

test-triton: ## run the kernels on the oldest and the newest Triton that work
	$(SETUP) --extra dev --last-step "running the kernels on Triton $(TRITONS)"
	@for version in $(TRITONS); do \
	  packages="$(CURDIR)/build/triton-$$version"; \
	  test -d "$$packages" || $(BIN)/python -m pip install --quiet --no-deps --target "$$packages" "triton==$$version" || exit 1; \
	  echo "Triton $$version"; \
	  PYTHONPATH="$$packages" $(BIN)/python -m pytest $(TRITON_TESTS) $(ARGS) || exit 1; \
	done

grade: ## grade exercises/ and write reports
	$(SETUP) --last-step "grading exercises/"
	@$(BIN)/gpukit grade $(ARGS)

book: ## build the course as a site, in build/book/html
	$(SETUP) --extra book --last-step "building the book"
	@$(BIN)/python docs/book.py build/book $(ARGS)

measure: ## print how long things take, beside what they should take at most
	$(SETUP) --extra dev --last-step "measuring"
	@$(BIN)/python -m tests.measure $(ARGS)

clean: ## remove .venv and everything that was built
	rm -rf "$(VENV)" build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
