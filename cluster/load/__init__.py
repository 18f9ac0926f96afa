"""Load on servers: its client, their comparison under the same loads, and the cores of both."""
