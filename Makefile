# The two commands a newcomer needs are `make demo` and `make test`; `make help` lists the rest.
#
# Variables: PYTHON=/path/to/python3.12   VENV=.venv   FROM_SCRATCH=1 (demo: make base policy and world model anew)
#            ARGS="..." (more arguments for the command that the target runs)
#            JOBS=N (processes that share the fast tests; as many as cores if not given, 0: pytest's own)

VENV ?= .venv
PYTHON ?=
FROM_SCRATCH ?=
ARGS ?=
JOBS ?= logical
export VENV PYTHON

BIN := $(VENV)/bin
# The MuJoCo back end that set-up saw working, unless the user has chosen one.
GL := MUJOCO_GL="$${MUJOCO_GL:-$$(cat $(VENV)/.mujoco_gl)}"

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test test-types test-live test-core test-slow test-slow-changed lint weight format docs pictures doctor constraints clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: ## install what the demo needs into $(VENV)
	@scripts/setup.sh core

setup-dev: ## install also LIBERO and the test tools
	@scripts/setup.sh dev

demo: setup ## the whole loop on the built-in tabletop: world model, RL in imagination, before and after, report.html
	$(GL) $(BIN)/vla-rl demo $(if $(filter-out 0,$(FROM_SCRATCH)),--from-scratch) $(ARGS)

lint: setup-dev ## ruff, the type checker and the ceilings of the code's weight
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(TYPES)

# The type checker, and the ceilings of the code's figures.
TYPES = $(BIN)/basedpyright --level error && $(GL) $(BIN)/python scripts/weight.py --path

weight: setup-dev ## lines, options, imports in circles and more: what each is, its ceiling and its goal
	$(GL) $(BIN)/python scripts/weight.py --path --tests

# The tests against the clock (live), which mostly wait, run one after another beside the type checker, which gives way to
# them (nice); then those that share the cores. A live test that fails is run once more, on processes of its own: a
# machine that stands still for a second is no fault of the robot's. Both runs are shown. With ARGS, one of the two parts
# of tests may have nothing to run (status 5).
PYTEST = OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" $(GL) $(BIN)/python -m pytest
FAST = not slow and not gpu and not network
LIVE = $(PYTEST) -m '$(FAST) and live' $(ARGS)
test: setup-dev ## ruff, the type checker, the fast tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs=2 test-types test-live
	$(PYTEST) -n $(JOBS) --dist worksteal -m '$(FAST) and not live' $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])

test-types:
	nice $(SHELL) -c '$(TYPES)'

test-live:
	$(LIVE); live=$$?; [ $$live -ne 1 ] || { $(LIVE) --last-failed --last-failed-no-failures none; live=$$?; }; \
	$(if $(ARGS),[ $$live -ne 5 ] || live=0;) exit $$live

CORE = tests/vla_rl/algorithms tests/vla_rl/rollout tests/vla_rl/training tests/sim/tabletop tests/test_golden.py
test-core: setup-dev ## the inner loop: types, algorithms, rollout, training, the tabletop
	$(PYTEST) -n $(JOBS) --dist worksteal -m '$(FAST) and not live' $(CORE) $(ARGS)

test-slow: setup-dev ## the slow tests (LIBERO's need its assets)
	$(GL) $(BIN)/python -m pytest -m 'slow and not gpu and not network' $(ARGS)

test-slow-changed: setup-dev ## those slow tests that import what changed since they passed (tests/slow_passed.json)
	$(GL) $(BIN)/python scripts/slow_tests.py $(ARGS)

format: setup-dev ## let ruff format and fix the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: setup-dev ## build the documentation site into site/; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

pictures: setup-dev ## draw the README's pictures anew from a run of the demo: make pictures ARGS=runs/FOLDER
	$(GL) $(BIN)/python scripts/pictures.py $(ARGS)

doctor: setup ## what this machine has and lacks
	$(GL) $(BIN)/vla-rl doctor $(ARGS)

constraints: setup-dev ## write constraints.txt anew from $(VENV)
	scripts/freeze.sh

clean: ## remove caches (keeps $(VENV) and runs/)
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
