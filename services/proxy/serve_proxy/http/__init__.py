"""HTTP for clients, over aiohttp."""
