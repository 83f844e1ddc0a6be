"""Log lines on their way out of a process: made, kept for a moment, bounded, and sent.

Why a package of its own: who logs must never wait, and must never fill the memory, whatever becomes of the lines.
"""
