# Everything happens in an environment of the project's own, .venv, which is made when it is first needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PINNED := $(if $(CI),requirements/ci.txt)  # the newest versions that pyproject.toml allows, but in CI
# The packages of Marin, Levanter and Fray among them, have one of their own, because they want other versions. It is
# always pinned: pip would look through hundreds of daily releases. The newest need Python 3.12.
MARIN := .venv-marin
MARINS_PYTHON := 3.12
PINNED_MARIN := requirements/marin.txt
FRAYS_FAULTS ?= 1
# So has each other version of Python. Its own are the tests of what an interpreter changes: processes and how they end,
# pickling, event loops, annotations, interfaces. What only calls services, reads files or computes is plain Python.
OTHER_PYTHONS := 3.12 3.13
ON_EVERY_PYTHON ?= $(addprefix tests/unit/, \
	$(addprefix actors/host/test_,exit_status.py ledger.py task_*.py user_code.py) \
	hangs/test_host.py inspection/test_host.py processes actors/calls actors/protocol history slots/front local $(addprefix client/test_,job_*.py launch.py run_options.py user_*.py) \
	$(addprefix task/test_,preemption.py progress.py) endpoints $(addprefix model/test_,job_*.py plain_values.py) \
	$(addprefix test_,errors.py public_names.py))
PINNED_PYTHONS := $(if $(CI),requirements/pythons.txt)
# So has each older version of Ray, the oldest first.
OLDER_RAYS := 2.49.2 2.55.1
QUIETLY := --quiet --disable-pip-version-check
# In the order of collection: tests without a cluster come first, while no process is connected to one. A process that
# crashes fails the run: with another in its place, pytest-xdist 3.8 may wait for ever.
TWO_PROCESSES := -n 2 --no-loadscope-reorder --max-worker-restart=0
THREE_PROCESSES := -n 3 --no-loadscope-reorder --max-worker-restart=0  # two run the tests on clusters; see tests/conftest.py

.PHONY: demo pictures test proofs proofs-long check lint quick coverage bench bench-beside bench-scheduling bench-marin bench-kueue bench-controller bench-faults bench-progress bench-hangs bench-large-gang bench-dashboard bench-slots chaos soak marin pythons ray-versions clean
.SECONDARY:  # environments stay

demo: $(READY)  ## a JAX training run on simulated TPU slices that loses two of them
	$(BIN)/python examples/demo.py

test: $(READY)  ## the tests, including those on real Ray clusters; twenty to thirty minutes on two cores
	$(BIN)/python -m pytest $(THREE_PROCESSES) $(ARGS)

proofs: $(READY)  ## many random worlds and sequences, rare faults, a minute of chaos; three quarters of an hour
	$(BIN)/python -m pytest --profile=proofs $(TWO_PROCESSES) $(ARGS)

proofs-long: $(READY)  ## loops of twenty kills, and whatever takes long on a cluster; three quarters of an hour
	$(BIN)/python -m pytest --profile=long $(TWO_PROCESSES) $(ARGS)

check: lint quick  ## what to run before every commit; under a minute

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: $(READY)  ## the tests without Ray nodes
	$(BIN)/python -m pytest $(THREE_PROCESSES) tests/unit -q

coverage: $(READY)  ## how much of iris_ray the tests without Ray nodes run; takes half as long again as make quick
	$(BIN)/python -m pytest $(THREE_PROCESSES) tests/unit -q --cov --cov-report=
	@echo "The tests without Ray nodes run $$($(BIN)/coverage report --format=total) % of iris_ray's lines."

bench: $(READY)  ## launch times beside the bare minimum that Ray needs
	$(BIN)/python benchmarks/launch.py

bench-dev: $(READY)  ## from an edited file to its first line on all hosts of a held slice; a minute
	$(BIN)/python benchmarks/dev.py

bench-beside: $(READY)  ## launches and dispatches beside open shells, ports and searches, and each kind by itself; three minutes
	$(BIN)/python benchmarks/beside.py --small

bench-scheduling: $(READY)  ## what a scheduling cycle, an event and the state cost; about a minute
	$(BIN)/python benchmarks/scheduling.py

bench-marin: $(MARIN)/.ready  ## a scheduling cycle beside that of marin-iris; two minutes
	$(MARIN)/bin/python benchmarks/scheduling.py --marin

bench-kueue: $(READY)  ## the loads of Kueue's performance tests on the scheduling core, beside its figures; some minutes
	$(BIN)/python benchmarks/kueue.py

bench-controller: $(READY)  ## a storm of tasks through the real Controller, and its recovery; about two minutes
	$(BIN)/python benchmarks/controller.py

bench-faults: $(READY)  ## how long a gang is away, by kind of fault, with a spare at hand; about five minutes
	$(BIN)/python -m benchmarks.faults

bench-progress: $(READY)  ## time lost by each kind of fault, in memory and beside Orbax and Levanter; half an hour
	$(BIN)/python benchmarks/progress.py

bench-slots: $(READY)  ## slots: decisions a second, loads beside the optimum, requests; about twelve minutes
	$(BIN)/python benchmarks/slots.py
	$(BIN)/python benchmarks/slots_front.py
	$(BIN)/python benchmarks/slot_traffic.py
	$(BIN)/python benchmarks/slots_on_ray.py

bench-hangs: $(READY)  ## how often the process that holds up its gang is named, of 120; about six minutes
	$(BIN)/python benchmarks/hangs.py --trials 120

bench-large-gang: $(READY)  ## what 1,024 hosts cost the pool and its SliceActors; about five minutes
	$(BIN)/python benchmarks/large_gang.py

bench-dashboard: $(READY)  ## what the dashboard costs on 5,008 hosts with 20 open pages; about two minutes
	$(BIN)/python benchmarks/dashboard.py

pictures: $(READY)  ## the recording of the demo and the picture of the dashboard in docs/; two minutes
	mkdir -p build/pictures
	$(PYTHON) -m venv build/termtosvg
	build/termtosvg/bin/python -m pip install $(QUIETLY) 'termtosvg==1.1.0' 'setuptools<81'
	$(BIN)/python tools/record_demo.py build/pictures/demo.cast
	build/termtosvg/bin/termtosvg render build/pictures/demo.cast docs/demo.svg -m 60 -t window_frame
	IRIS_TEST_SCREENSHOTS=build/pictures $(BIN)/python -m pytest -q tests/unit/dashboard/test_pages.py -k 'fits_its_window and light'
	cp build/pictures/light-fleet.png docs/dashboard-fleet.png

KERNEL = build/kernel
# What the kernel must do without any service: its own tests, a first script, and a gang that loses a slice. The pure core
# (model, state, scheduler) is left to `make test`: an import contract ensures that services don't matter to it.
KERNELS_TESTS = tests/unit/actors tests/unit/client tests/unit/task
A_LOST_SLICE = tests/cluster/test_losses.py::test_lost_host_costs_slice_and_one_preemption

kernel: $(READY)  ## the kernel without any service, and everything else without each single one; about three minutes
	$(BIN)/python -m tools.without_services kernel $(KERNEL)
	cd $(KERNEL) && PYTHONPATH=. $(CURDIR)/$(BIN)/python -m pytest $(THREE_PROCESSES) -q $(KERNELS_TESTS) $(ARGS)
	cd $(KERNEL) && PYTHONPATH=. $(CURDIR)/$(BIN)/python examples/hello.py
	cd $(KERNEL) && PYTHONPATH=. $(CURDIR)/$(BIN)/python -m pytest -q $(A_LOST_SLICE)
	$(BIN)/python -m tools.without_services each build/without

chaos: $(READY)  ## ten minutes of faults in random order; more with: .venv/bin/python -m tests.proofs.chaos --minutes 30
	$(BIN)/python -m tests.proofs.chaos

soak: $(READY)  ## an hour of small jobs and faults, and what grows with them; shorter with: .venv/bin/python -m tests.proofs.soak --minutes 10
	$(BIN)/python -m tests.proofs.soak

marin: $(MARIN)/.ready  ## Levanter and Flax train, and jobs of Fray's run, on simulated slices that are lost; ten minutes, and 2 GB of packages
	$(MARIN)/bin/python -m pytest --profile=all tests/unit/levanter tests/unit/fray tests/unit/history/test_parquet.py tests/cluster/marin $(ARGS)
	$(MARIN)/bin/python -m tests.proofs.every_operation parquet --share 0.1
	$(MARIN)/bin/python -m tests.proofs.every_operation fray --share $(FRAYS_FAULTS)

$(MARIN)/.ready: pyproject.toml $(PINNED_MARIN)
	python=$$(tools/find_python $(MARINS_PYTHON)) && $$python -m venv $(MARIN)
	$(MARIN)/bin/python -m pip install $(QUIETLY) $(addprefix --constraint ,$(PINNED_MARIN)) --editable '.[test,levanter,fray,frameworks]' marin-zephyr
	touch $@

pythons: $(OTHER_PYTHONS:%=quick-on-%)  ## the tests of what an interpreter changes, on the other Pythons; two minutes

quick-on-%: .venv-python-%/.ready
	$(<D)/bin/python -m pytest $(THREE_PROCESSES) $(ON_EVERY_PYTHON) -q $(ARGS)

.venv-python-%/.ready: pyproject.toml $(PINNED_PYTHONS)
	python=$$(tools/find_python $*) && $$python -m venv $(@D)
	$(@D)/bin/python -m pip install $(QUIETLY) $(addprefix --constraint ,$(PINNED_PYTHONS)) --editable '.[bench,examples,test]'
	touch $@

ray-versions: $(READY) $(OLDER_RAYS:%=.venv-ray-%/.ready)  ## the main paths on the oldest Ray that iris_ray takes, on one between, and on the newest; five minutes
	$(BIN)/python -m pytest --profile=all tests/cluster/test_ray_versions.py $(ARGS)

.venv-ray-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(QUIETLY) 'ray[default]==$*' --editable .
	touch $@

$(READY): pyproject.toml $(PINNED)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "iris_ray needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	@echo "Ray, JAX and the tools of this repository are installed into .venv: 2.2 GB and some minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(QUIETLY) $(addprefix --constraint ,$(PINNED)) --editable '.[dev]'
	touch $(READY)

.PHONY: release
release: $(READY)  ## build, check and tag a release: make release VERSION=0.1.0; docs/releasing.md
	$(BIN)/python -m tools.release $(VERSION)

.PHONY: site
site: $(READY)  ## the documentation as a site, in build/site; a warning fails it; ten seconds
	$(BIN)/python tools/build_site.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/zensical build --strict

clean:
	rm -rf .venv .venv-ray-* .venv-python-* $(MARIN) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
