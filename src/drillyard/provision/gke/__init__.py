"""Clusters of Google Kubernetes Engine."""
