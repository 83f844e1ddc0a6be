"""The admin API: verbs, commands, queries and views."""
