"""Logs, traces and metrics of a replica."""
