"""Run one of Swift's servers from a folder of configuration files; run by Swift's own interpreter.

Swift's own programs expect ``swift.conf`` in ``/etc/swift`` alone, where only root may write.

Usage: server.py FOLDER account|container|object|proxy
"""

from __future__ import annotations

import sys
from pathlib import Path

from swift.common import utils


def main() -> int:
    """Serve until SIGTERM."""
    folder, server = Path(sys.argv[1]), sys.argv[2]
    utils.set_swift_dir(str(folder))
    # Both read swift.conf at their import, or on request.
    from swift.common.storage_policy import reload_storage_policies
    from swift.common.wsgi import run_wsgi

    reload_storage_policies()
    ended: int = run_wsgi(str(folder / f"{server}-server.conf"), f"{server}-server", verbose=True)
    return ended


if __name__ == "__main__":
    sys.exit(main())
