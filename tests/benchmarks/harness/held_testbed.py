"""Make a testbed with a process in each namespace, print their names and ids, and wait to be ended."""

from __future__ import annotations

import json
import signal
import sys
import time

from benchmarks.harness.testbed import Testbed

if __name__ == "__main__":
    # Background jobs of a shell ignore this signal from their start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Testbed(check=False) as bed:
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        pids = [bed.popen(side, sleeper).pid for side in bed.addresses]
        print(json.dumps({"names": bed.namespaces, "pids": pids}), flush=True)
        time.sleep(600)
