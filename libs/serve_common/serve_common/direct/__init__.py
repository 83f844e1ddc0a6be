"""Direct links: connections between a router and a replica, on which frames bypass NATS."""
