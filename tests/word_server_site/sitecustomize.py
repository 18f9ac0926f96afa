"""With this folder in PYTHONPATH, `specdec serve` and its Ray workers know `--engine words`."""

import sys

if any(word == "jobs.serve" or word.endswith("default_worker.py") for word in sys.orig_argv):
    from specdec_core.servers.table import SERVERS
    from tests.word_server import WordServer

    SERVERS["words"] = WordServer()
