"""Another program's server, as vLLM's, behind this library's HTTP application.

A replica is a process of that server. Requests and answers pass through as bytes.
"""
