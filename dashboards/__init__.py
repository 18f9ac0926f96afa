"""What people look at: tables, figures, the report, MLflow."""

import os

# MLflow reads these when it is imported.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # the default retries for minutes
}.items():
    os.environ.setdefault(_name, _value)
