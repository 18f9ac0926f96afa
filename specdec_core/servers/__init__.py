"""The servers that users run, a folder each, behind one protocol.

A folder has all that this library knows of a server: its settings for our drafters, how it starts
and stops, what its steps cost, what its metrics tell, and our plug-in for it. The table of servers
is :mod:`specdec_core.servers.table`.
"""
