"""MLflow: an experiment for each pair, a parent run for each sweep with a nested run for each
configuration, and the champion as a registered model."""
