"""The routes, and what the routes that generate text take and answer."""
