"""NATS: the data plane's own client, and what services need over nats-py."""
