"""What watches a server: a Grafana dashboard, and settings for Prometheus and Grafana."""
