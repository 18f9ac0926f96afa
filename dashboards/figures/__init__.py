"""Functions from results to plotly figures, for reports, MLflow and notebooks. Each figure can be
read alone."""
