"""Prefect flows over `dflash_core`, one file per stage, and the `dflash` command.

The settings below must be in the environment before Prefect or torch is imported; each can be overridden there.
"""

import os
import sys

SETTINGS = {
    # Nothing about a run leaves the machine.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The first start migrates a fresh database, which takes up to a minute on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    # The defaults record one task run at a time: 138 s behind after 1,000 tasks, 14 s with these.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    # What the core logs shows on the run's page.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "dflash_core",
    # It logs from threads of its own, too; those lines have no page to go to.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Needed to notice a machine that went away with worker and flow at once.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Threads that sleep at once while they wait for each other make small models half as fast; threads that
    # spin as long as libgomp lets them by default make a CPU that does something else, too, up to 20 times
    # slower. This is as fast as the default on an idle CPU (benchmarks/training_cpu.py, alone and twice).
    "GOMP_SPINCOUNT": "10000",
}

# Only a server misses them, and each flow waits half a second for the thread that sends them.
_FOR_SERVERS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY"}

for _name, _value in SETTINGS.items():
    if _name not in _FOR_SERVERS or "PREFECT_API_URL" in os.environ:
        os.environ.setdefault(_name, _value)

# Prefect puts the folder of a deployed flow in front of `sys.path`, where our tokenize.py would hide Python's own
# from every process that is started later.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
