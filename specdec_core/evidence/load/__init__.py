"""Servers under load: the requests, the answers, and the comparison of servers."""
