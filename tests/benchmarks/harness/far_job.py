"""Run a training job on the compute side of a testbed: it reaches store and server over the link alone.

Arguments: the server's address, the store's URI, the store's options as JSON. Prints the losses of an unsplit
run and of a split one, and the source of the samples of both.
"""

from __future__ import annotations

import json
import os
import sys

import upriver
from tests.finetune.training import STAGES, run


def main() -> None:
    url, uri, options = sys.argv[1:]
    store = upriver.Store.open(uri, options=json.loads(options))
    data = upriver.index(store, "photos", stages=STAGES)
    found: dict[str, object] = {"digest": data.digest}
    with upriver.connect(url, token=os.environ["UPRIVER_TOKEN"]) as near:
        for policy in ("nosplit", "freeze"):
            losses, _, job = run(near, data, policy=policy)
            found[policy] = {"losses": [loss.item() for loss in losses], "samples": job.report.samples}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
