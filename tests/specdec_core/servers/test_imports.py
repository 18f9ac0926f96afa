"""The plug-ins need torch, transformers, pydantic and PyYAML, and nothing else of what is installed
with this project."""

import sys

from tests.commands import ran

ABSENT = """
ray mlflow pandas scipy pyarrow llguidance pydivsufsort optuna plotly httpx typer rich accelerate
prometheus_client gguf vllm cluster dashboards jobs
"""
PROGRAM = f"""
import sys
for name in {ABSENT.split()}:
    sys.modules[name] = None  # importing it raises ImportError
import specdec_core.servers.transformers.plug_in, specdec_core.servers.vllm.plug_in
import specdec_core.servers.vllm.repairs
from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings, kinds_of, run_time
for table in DRAFTERS, POLICIES:
    for settings in kinds_of(table, KindSettings).values():
        run_time(settings)
"""


def test_the_plug_ins_and_all_drafters_import_without_ray_and_mlflow():
    ran(sys.executable, "-c", PROGRAM)
