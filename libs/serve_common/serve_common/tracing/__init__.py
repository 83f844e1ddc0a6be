"""Traces without a library: ids and their headers, who is sampled, and spans as plain records.

Why without one: most requests are not traced, and those must not pay for objects of an SDK. What is traced is noted
here and handed on when it has ended; only `serve_common.adapters.otlp_export` knows OpenTelemetry.
"""
