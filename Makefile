# Every target is one or two lines; `make help` prints the comments behind the double hashes.
SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/.installed
PACKAGES := libs/serve_common libs/muster libs/embedded services/console services/controller services/proxy services/replica-host
.DEFAULT_GOAL := help
.PHONY: help install run browser screenshots test test-quick check format wheels simulate fuzz bench bench-lifecycle bench-peers bench-wires bench-leaks \
	bench-chaos bench-conflicts bench-full-disk bench-hangs bench-link-cuts bench-machines bench-restored bench-slow-readers bench-uploads \
	bench-scale bench-autoscaling bench-rollouts bench-captures bench-scaling parity parity-record docs dashboards compose-up compose-down upgrade secrets plain-conf lock stats clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock $(addsuffix /pyproject.toml,$(PACKAGES))
	python3 -m venv .venv
	awk '/^[^ ]/ {is_uv = /^uv==/} is_uv' requirements.lock > .venv/uv.lock
	.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock
	.venv/bin/uv pip install --quiet --python $(PY) --require-hashes -r requirements.lock
	.venv/bin/uv pip install --quiet --python $(PY) --no-deps --no-build-isolation $(addprefix -e ,$(PACKAGES))
	touch $(STAMP)

install: $(STAMP) ## Make .venv and install everything that is locked

run: $(STAMP) ## Start the embedded stack, deploy the example, print the curl line; Ctrl-C stops it
	.venv/bin/muster up --deploy-example

# Three parts: what needs no servers, on all cores; what measures, with the machine to itself; and all else, a file for each
# core. This is last, so that what had to be left out is said at the end.
QUICK := tests/unit tests/properties tests/simulation
AT_ONCE := 2

test: browser test-quick ## Run every test that this machine allows (about 40 minutes on two cores)
	$(PY) -m pytest -m alone $(addprefix --ignore=,$(QUICK))
	$(PY) -m pytest -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder -m "not alone" $(addprefix --ignore=,$(QUICK))

browser: ## Install chromium, which tests of the console need, where there is none and apt may; without it they are left out
	@deploy/install-browser.sh || echo "chromium could not be installed: tests in a browser are left out" >&2

screenshots: $(STAMP) browser ## Take the pictures of the console's pages in docs/images/console anew (about 3 minutes)
	$(PY) -m docs.screenshots

test-quick: $(STAMP) ## Run unit, property and simulation tests only (about 5 minutes on two cores)
	$(PY) -m pytest -n auto $(QUICK)

check: $(STAMP) ## Lint, types and import contracts
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: $(STAMP) ## Format the code
	.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

simulate: $(STAMP) ## Simulate the control plane with faults from SEEDS=2000 seeds, beginning with SEED=0
	$(PY) -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS))

fuzz: $(STAMP) ## Send 50,000 hostile HTTP pipelines and 5,000 generated admin calls (about 5 minutes); SEED=1 draws the same again
	$(PY) -m tests.fuzz $(if $(SEED),--seed $(SEED)) $(if $(PIPELINES),--pipelines $(PIPELINES)) $(if $(CALLS),--calls $(CALLS))

bench: $(STAMP) ## Measure the data plane next to its floors, in one run
	$(PY) -m bench

bench-lifecycle: $(STAMP) ## Measure deploy, update, scaling and delete next to bare Ray
	$(PY) -m bench.lifecycle

.bench-peers/.installed: $(STAMP)
	.venv/bin/uv venv --quiet --clear --python $(PY) .bench-peers
	.venv/bin/uv pip install --quiet --compile-bytecode --python .bench-peers/bin/python 'ray[serve]==2.60.0' python-multipart
	touch $@

bench-peers: .bench-peers/.installed ## Both of these beside Ray Serve 2.60, which has a virtual environment of its own
	$(PY) -m bench --peers
	$(PY) -m bench.lifecycle --peers

bench-wires: $(STAMP) ## Measure the data plane's NATS connection next to nats-py
	$(PY) -m bench.wires

bench-leaks: $(STAMP) ## Send 100,000 requests of which 30 % are cancelled, and look for what stays behind
	$(PY) -m bench.leaks --requests 100000

bench-chaos: $(STAMP) ## Kill a replica every 2 s for a minute under load, and count what fails
	$(PY) -m bench.chaos

bench-conflicts: $(STAMP) ## Let five clients give conflicting commands for a minute beside a bystander, and look at what stays
	$(PY) -m bench.conflicts

bench-full-disk: $(STAMP) ## Fill the disk under a whole stack for a minute (needs to mount one), and count what fails
	$(PY) -m bench.full_disk

bench-hangs: $(STAMP) ## Stop nats-server for 4, 12 and 25 s under load, idle and in an update, and count what that costs
	$(PY) -m bench.hangs

bench-link-cuts: $(STAMP) ## Cut direct links and connections to NATS under 10,000 requests of all kinds while replicas roll
	$(PY) -m bench.link_cuts

bench-machines: $(STAMP) ## Measure proxy and replica in containers as on two machines, for each MUSTER_DIRECT (needs Docker)
	$(PY) -m bench.machines

bench-slow-readers: $(STAMP) ## Let 1,000 clients read almost nothing of long streams, and look at the memory that costs
	$(PY) -m bench.slow_readers

bench-restored: $(STAMP) ## Restore Postgres to a state of 20 changes ago under load, again and again; backups under changes
	$(PY) -m bench.restored

bench-uploads: $(STAMP) ## Bring one proxy 300 uploads of 5 MiB at once, and look at how soon each is answered, and at its memory
	$(PY) -m bench.uploads

bench-scale: $(STAMP) ## Measure the controller beside up to 10,000 replicas on 1,000 simulated hosts
	$(PY) -m bench.scale

bench-autoscaling: $(STAMP) ## Compare the autoscaling policy with Ray Serve's and Knative's on simulated loads
	$(PY) -m bench.autoscaling

bench-rollouts: $(STAMP) ## Compare the judge of rollouts with Argo's and Flagger's analyses on simulated versions, good and bad
	$(PY) -m bench.rollouts

bench-captures: $(STAMP) ## Measure in pairs what it costs to capture 1 % of all requests
	$(PY) -m bench.capture_cost

bench-scaling: $(STAMP) ## Let real replicas follow a load of 1 to 50 clients and back, and wake from zero
	$(PY) -m bench.scaling

parity: .bench-peers/.installed ## Run the programs of tests/parity under Ray Serve 2.60 and Muster, and show where they print something else
	$(PY) -m tests.parity

parity-record: .bench-peers/.installed ## Write down what those programs print under Ray Serve
	$(PY) -m tests.parity --record

docs: $(STAMP) ## Write the reference pages in docs/reference anew from the code
	$(PY) -m docs.generator

dashboards: $(STAMP) ## Write Grafana's dashboards anew from what describes them
	$(PY) -m deploy.grafana.boards

secrets: $(STAMP) ## Generate the NATS identities and passwords that compose needs, into secrets/ (kept when present)
	.venv/bin/muster secrets --directory secrets

# Grafana's image is the only one that may be out of reach without harm: then the rest runs without it, and it is said.
GRAFANA_IMAGE := grafana/grafana:12.2.0

compose-up: secrets ## Build and start the containers, wait until all are healthy
	@if docker image inspect $(GRAFANA_IMAGE) >/dev/null 2>&1 || docker pull -q $(GRAFANA_IMAGE) >/dev/null 2>&1; \
	then docker compose up -d --build --wait; \
	else echo "$(GRAFANA_IMAGE) cannot be pulled: Grafana is left out"; \
	docker compose -f compose.yaml -f deploy/grafana/left-out.yaml up -d --build --wait; fi

upgrade: $(STAMP) ## Build anew, and replace replica hosts, proxies, controllers and the console one at a time, without a failed request
	docker compose build --quiet controller proxy replica-host console
	deploy/upgrade.sh

compose-down: ## Stop the containers (volumes are kept)
	docker compose down

plain-conf: $(STAMP) ## Write deploy/nats/plain.conf anew from the table of roles
	$(PY) -m serve_common.identities > deploy/nats/plain.conf

wheels: $(STAMP) ## Build the wheels of all packages into dist/
	rm -rf dist
	set -e; for package in $(PACKAGES); do .venv/bin/uv build --quiet --wheel --no-build-isolation --python $(PY) --out-dir dist $$package; done

lock: $(STAMP) ## Make requirements.lock anew, for Python 3.11 and later, with the hashes of all files of each release
	.venv/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --group dev pyproject.toml \
		--python-version 3.11 --upgrade -o requirements.lock

stats: $(STAMP) ## Count files and lines of the product, the tests and the benchmarks
	$(PY) -m tests.stats

clean: ## Remove .venv and all state of the embedded stack
	rm -rf .venv .muster .bench-peers
