"""One writer each of sections and reports: console, Markdown, HTML, files, MLflow."""
