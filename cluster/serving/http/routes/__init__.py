"""The routes by subject: each module makes a router for a service."""
