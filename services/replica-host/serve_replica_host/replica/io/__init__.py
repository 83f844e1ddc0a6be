"""A replica's NATS connection: frames in, frames out, slots."""
