"""Grafana dashboards as code. `python -m dashboards` writes them to where the Helm chart ships them from."""
