# Every target sets up what it needs: `make demo` on a bare machine with Python, g++ and make is enough.
# Without g++ all of it works too, on the slower reference kernels.

# The first Python that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# torch goes first, on its own. Where your package index serves a build with GPU libraries and you want the small one:
# make setup TORCH='torch==2.13.0 --index-url <an index of CPU builds>'
TORCH ?= torch==2.13.0
STAMP := $(VENV)/.foredraft-installed
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*.cpp native/*.h native/*.inl native/CMakeLists.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
FOREDRAFT := $(BIN)/foredraft
MODEL ?= smollm2-135m
PROMPTS := benchmarks/data/bench.jsonl
RESULTS := benchmarks/results
DRAFTERS := $(RESULTS)/decode-drafters.json
# The model's own first layers, as draft models of it.
PAIRS := build/pairs

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak fuzz fuzz-server check bench bench-serve bench-drafters bench-plan bench-agent bench-structured bench-load certify plan-plots identity report picture screenshots sanitize clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Create .venv with torch, the compiled kernels and the developer tools (a few minutes)

$(STAMP): $(SOURCES)
	@echo "Setting up foredraft: three steps, a few minutes the first time."
	@test -x $(BIN)/python && echo "1/3 $(VENV) is there" || { \
	  test -n "$(PYTHON)" || { echo "foredraft needs Python 3.11 or newer: install python3.11, python3.11-venv"; exit 1; }; \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "foredraft needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`"; exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "$(PYTHON) can't make virtual environments: install python3-venv (apt-get install python3-venv)"; exit 1; }; \
	  command -v c++ >/dev/null || echo "no C++ compiler found: the slower reference kernels will run (apt-get install g++)"; \
	  $(PYTHON) -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' \
	    || echo "no Python headers found: the slower reference kernels will run (apt-get install python3-dev)"; \
	  echo "1/3 creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "2/3 installing $(TORCH): the largest download, one to three minutes"
	@$(PIP) $(TORCH)
	@echo "3/3 compiling the kernels, installing foredraft and the developer tools: about a minute"
	@$(PIP) --editable '.[dev]'
	@touch $(STAMP)
	@echo "Done: $(FOREDRAFT) is ready."

demo: setup  ## Generate with and without speculation: an answer that copies, then free text
	@echo
	@echo "1/2 An answer that repeats most of its prompt: drafts are looked up there, expect the larger gain."
	$(FOREDRAFT) generate $(MODEL) --compare --max-tokens 256 --prompt-file examples/edit.txt
	@echo
	@echo "2/2 Free text: drafts come from a table of what the model tends to say, expect a gain too."
	$(FOREDRAFT) generate $(MODEL) --compare --max-tokens 128 --prompt-file examples/chat.txt

test: setup  ## Run the test suite (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

MINUTES ?= 30
soak: setup  ## New lives of the engine for MINUTES=30, then the property tests with a thousand examples each
	FOREDRAFT_SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/engine/test_soak.py
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=soak

FUZZ_SECONDS ?= 600
fuzz: setup  ## Fuzz the readers of model files, FUZZ_SECONDS=600 each
	$(PIP) 'atheris>=3' || echo "no atheris for this Python: mutation alone"
	$(BIN)/python fuzz/make_corpus.py build/fuzz
	mkdir -p build/fuzz/found-gguf build/fuzz/found-safetensors
	nice -n 19 $(BIN)/python fuzz/fuzz_gguf.py -max_total_time=$(FUZZ_SECONDS) \
	  -artifact_prefix=build/fuzz/ build/fuzz/found-gguf build/fuzz/gguf
	nice -n 19 $(BIN)/python fuzz/fuzz_safetensors.py -max_total_time=$(FUZZ_SECONDS) \
	  -artifact_prefix=build/fuzz/ build/fuzz/found-safetensors build/fuzz/safetensors

BODIES ?= 5000
fuzz-server: setup  ## Fuzz a running server: BODIES=5000 malformed requests beside a good client, 300 of each path by its schema
	FOREDRAFT_FUZZ_BODIES=$(BODIES) FOREDRAFT_SCHEMA_EXAMPLES=300 $(BIN)/python -m pytest \
	  tests/server/test_fuzz.py tests/server/test_schema.py --durations=2

check: setup  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What `auto` chooses among, and what costs passes, under the policy that must not let it lose.
SETTLED := {"method":"ngram" {"method":"suffix" {"method":"auto" {"method":"auto","policy":"adaptive" {"method":"blended"
DECODE := $(FOREDRAFT) bench decode $(MODEL) --workload $(PROMPTS) --dtype bfloat16
bench: setup  ## Measure kernels and decoding (about 15 minutes, on a quiet machine), then the pages of figures
	$(FOREDRAFT) bench kernels --output $(RESULTS)/kernels.json
	$(DECODE) --limit-per-task 6 --peer transformers --output $(RESULTS)/decode-peers.json
	$(DECODE) --speculative-config '{"method":"ngram","num_speculative_tokens":5}' \
	  --speculative-config '{"method":"ngram","num_speculative_tokens":8}' --output $(RESULTS)/decode.json
	$(FOREDRAFT) export $(MODEL) $(PAIRS)/8 --layers 8 --force
	$(DECODE) --limit-per-task 4 --repeats 2 --max-tokens 96 \
	  $(foreach config,$(SETTLED),--speculative-config '$(config)}') --output $(RESULTS)/decode-auto.json
	for length in 512 2000 4000; do $(DECODE) --limit-per-task 1 --max-tokens 64 --ignore-eos --prompt-tokens $$length \
	  --speculative-config '{"method":"ngram","num_speculative_tokens":4}' --speculative-config '{"method":"suffix"}' \
	  --speculative-config '{"method":"recycling"}' --output $(RESULTS)/decode-context-$$length.json || exit 1; done
	$(FOREDRAFT) export $(MODEL) $(PAIRS)/29 --layers 29 --force
	$(DECODE) --limit-per-task 2 --max-tokens 512 --ignore-eos \
	  --speculative-config '{"method":"draft_model","model":"$(PAIRS)/8","num_speculative_tokens":2}' \
	  --speculative-config '{"method":"draft_model","model":"$(PAIRS)/29","num_speculative_tokens":2}' \
	  --output $(RESULTS)/decode-draft-model.json
	$(MAKE) report

SERVE := $(FOREDRAFT) bench serve $(MODEL) --workload $(PROMPTS) --dtype bfloat16 --seconds 40
# Where look-ups can't pay; a table of the target's own n-grams gains there too.
HOPELESS := --hopeless --speculative-config '{"method":"ngram"}'
bench-serve: setup  ## Measure serving, 1 to 32 requests at once (about 85 minutes, on a quiet machine), and the simulator
	$(SERVE) --output $(RESULTS)/serve.json --plot docs/planning/serve.svg
	$(FOREDRAFT) bench simulate $(RESULTS)/serve.json --output $(RESULTS)/simulated.json
	$(FOREDRAFT) bench replay $(MODEL) --result $(RESULTS)/serve.json --workload $(PROMPTS) --dtype bfloat16 \
	  --output $(RESULTS)/replay.json
	$(SERVE) $(HOPELESS) --temperature 1.2 --widths 2 --concurrency 1,8,32 --rounds 5 --output $(RESULTS)/serve-hot.json
	$(SERVE) $(HOPELESS) --prompt-tokens 2000 --max-tokens 8 --widths 2 --concurrency 1,8 --requests 16 --seconds 20 \
	  --rounds 2 --output $(RESULTS)/serve-long-prompts.json
	$(MAKE) report

# Each as it is and with the adaptive policy, which may draft less.
FREE := {"method":"ngram" {"method":"suffix" {"method":"ngram_table" {"method":"recycling" {"method":"combined" {"method":"lookahead"
PAID := {"method":"early_exit","num_speculative_tokens":2 \
  {"method":"draft_model","model":"$(PAIRS)/8","num_speculative_tokens":2 \
  {"method":"cascade","model":"$(PAIRS)/8","drafter":{"method":"suffix"},"num_speculative_tokens":4
bench-drafters: setup  ## Measure every drafter that needs no training, by task (about 13 minutes, on a quiet machine)
	$(FOREDRAFT) export $(MODEL) $(PAIRS)/8 --layers 8 --force
	$(DECODE) --limit-per-task 10 \
	  $(foreach config,$(FREE) $(PAID),--speculative-config '$(config)}' --speculative-config '$(config),"policy":"adaptive"}') \
	  --output $(DRAFTERS)
	$(MAKE) report

bench-plan: setup  ## Plan on the benchmark prompts and run ten configurations against the prediction (about 5 minutes)
	$(FOREDRAFT) plan $(MODEL) --workload $(PROMPTS) --dtype bfloat16 --recalibrate --max-tokens 64 --check 10 \
	  --output $(RESULTS)/plan.json --plot docs/planning/workload.svg
	$(MAKE) report

bench-agent: setup  ## Replay an agent loop with the suffix drafter (about 5 minutes)
	$(BIN)/python benchmarks/agent_loop.py $(MODEL) --output $(RESULTS)/agent-loop.json
	$(MAKE) report

bench-structured: setup  ## Answer 200 requests under JSON schemas, plain and with drafts (about 4 minutes)
	$(BIN)/python benchmarks/structured.py $(MODEL) --out $(RESULTS)/structured.json
	$(MAKE) report

LOAD_MINUTES ?= 10
bench-load: setup  ## Keep 64 streams asking for LOAD_MINUTES=10, then compare what readers wait for (about 15 minutes)
	$(BIN)/python benchmarks/load.py $(MODEL) --minutes $(LOAD_MINUTES) --only adaptive --output $(RESULTS)/load.json
	$(BIN)/python benchmarks/load.py $(MODEL) --minutes 1.2 --only plain --only adaptive --only adaptive-paced \
	  --output $(RESULTS)/load-readers.json
	$(MAKE) report

EXPORTED := {"method":"draft_model","model":"$(PAIRS)/8","num_speculative_tokens":4}
certify: setup  ## Certify two pairs, plant faults that must be found, and show the power (about 20 minutes)
	$(FOREDRAFT) export $(MODEL) $(PAIRS)/8 --layers 8 --force
	$(FOREDRAFT) certify $(MODEL) --method ngram --json > $(RESULTS)/certify/ngram.json
	$(FOREDRAFT) certify $(MODEL) --speculative-config '$(EXPORTED)' --json > $(RESULTS)/certify/draft-model.json
	$(BIN)/python benchmarks/certify_faults.py $(MODEL) $(PAIRS)/8 --output $(RESULTS)/certify/faults.json
	$(BIN)/python benchmarks/certify_power.py $(MODEL) '{"method":"ngram"}' --output $(RESULTS)/certify/power-ngram.json
	$(BIN)/python benchmarks/certify_power.py $(MODEL) '$(EXPORTED)' --output $(RESULTS)/certify/power-draft-model.json

PLAN := $(FOREDRAFT) plan --alpha 0.75 --draft-cost 0.05 --loads 1,2,4,8,16,32,64,128
plan-plots: setup  ## Draw docs/planning/*.svg: what data sheets promise
	$(PLAN) --plot docs/planning/gpu.svg \
	  --roofline '{"weights_gb":16,"bandwidth_gb_s":3350,"tflops":600,"overhead_ms":1}'
	$(PLAN) --plot docs/planning/sparse.svg \
	  --roofline '{"weights_gb":60,"bandwidth_gb_s":3350,"tflops":600,"overhead_ms":1,"experts":64,"experts_per_token":8,"expert_share":0.9}'
	$(PLAN) --plot docs/planning/long.svg \
	  --roofline '{"weights_gb":16,"bandwidth_gb_s":3350,"tflops":600,"overhead_ms":1,"context":8000,"kv_kb_per_position":128}'

identity: setup  ## Compare tokens and logits with plain decoding's, on all prompts
	$(FOREDRAFT) bench identity $(MODEL) --workload $(PROMPTS) --output $(RESULTS)/identity.json

HEADLINES := $(RESULTS)/decode-auto.json $(RESULTS)/decode-peers.json $(RESULTS)/serve.json
report: setup  ## Write the figures of the README and of docs from benchmarks/results
	$(BIN)/python -m foredraft.bench.report README.md $(HEADLINES)
	$(BIN)/python -m foredraft.bench.report docs/figures.md $(RESULTS)
	test ! -e $(DRAFTERS) || $(BIN)/python -m foredraft.bench.report --by-task docs/drafters/README.md $(DRAFTERS)

picture: setup  ## Run the demo and draw its terminal output into docs/demo.svg
	$(BIN)/python docs/draw_demo.py docs/demo.svg $(MODEL)

screenshots: setup  ## Draw the live page into docs/screenshots, light and dark (needs chromium)
	$(BIN)/python docs/draw_page.py docs/screenshots $(MODEL)

# The interpreter itself is not built for a sanitizer, so its runtime is preloaded and its own leaks are not counted.
SANITIZED := build/sanitize
sanitize: setup  ## Run tests/native under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nanobind cmake ninja
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DFOREDRAFT_SANITIZE=ON -DPython_EXECUTABLE="$(abspath $(BIN))/python"
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(SANITIZED)
	FOREDRAFT_TEST_EXTENSION="$$(ls $(abspath $(SANITIZED))/native/_native*.so)" \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so) $$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	$(BIN)/python -m pytest tests/native -p no:cacheprovider

clean:  ## Remove the virtual environment and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
