"""What people look at: tables, figures, the report, MLflow."""

import os

# MLflow reads this when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
