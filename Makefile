# make demo and make test set everything up on a machine with Python 3.11, g++, git and make.
PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
OTHER_TORCH_SPEC ?= torch==2.14.1
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
JOBS ?= 2

.PHONY: demo test test-all test-other-torch lint format generate native native-asan native-tsan bench clean

# One stamp a step: with an existing .venv nothing is asked from the network, unless pyproject.toml changed.
$(VENV)/.torch-$(TORCH_SPEC):
	$(PYTHON) -m venv $(VENV) || \
	  { echo '$(PYTHON) makes no virtual environment: apt install python3-venv, or name another PYTHON=' >&2; exit 1; }
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q '$(TORCH_SPEC)'
	rm -f $(VENV)/.torch-*
	touch '$@'

$(VENV)/.installed: $(VENV)/.torch-$(TORCH_SPEC) pyproject.toml setup.py $(shell find csrc -name '*.cpp' -o -name '*.h')
	test -f '$@' || $(BIN)/python -m pip install -q 'setuptools>=77' ninja numpy
	$(BIN)/python -m pip install -q --no-build-isolation $(if $(filter pyproject.toml,$?),,--no-deps) -e '.[test]'
	touch '$@'

$(VENV)/.lint: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[lint]'
	touch '$@'

$(VENV)/.browser: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[browser]'
	touch '$@'

$(VENV)/.models: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[models]'
	touch '$@'

demo: $(VENV)/.installed
	$(BIN)/tensorplay doctor
	$(BIN)/python examples/train_text.py --report report.json
	$(BIN)/tensorplay check examples/train_text.py:build
	$(BIN)/tensorplay demo

test: $(VENV)/.installed
	$(PYTEST) -n $(JOBS) -m 'not long'
	@echo 'not run by make test: tests/native (make native, native-asan, native-tsan: need GoogleTest), the other torch' \
	  '(make test-other-torch), tests marked long (make test-all runs all of these), tests/gpu (tests/gpu/run.sh: a GPU)'

test-all: $(VENV)/.browser $(VENV)/.models native native-asan native-tsan test-other-torch
	$(PYTEST) -n $(JOBS) -m long

# In a copy: the extension lies beside the sources, and there is one for each torch.
test-other-torch:
	rm -rf build/other-torch
	mkdir -p build/other-torch
	git ls-files -z | tar --null -T - -c | tar -x -C build/other-torch
	$(MAKE) -C build/other-torch test VENV=$(abspath $(VENV)-other-torch) TORCH_SPEC='$(OTHER_TORCH_SPEC)'

native native-asan native-tsan: $(VENV)/.installed
	$(MAKE) -C tests/native PYTHON=$(abspath $(BIN)/python) $(or $(patsubst native-%,%,$(filter native-%,$@)),test)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cpp')
	$(BIN)/python docs/generate.py --check
	TENSORPLAY_WERROR=1 $(BIN)/python setup.py -q build_ext --build-lib build/werror --build-temp build/werror

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cpp')

generate: $(VENV)/.installed
	$(BIN)/python docs/generate.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_inspect.py

clean:
	rm -rf build $(VENV) tensorplay/_C*.so tensorplay/_build_info.py
