"""Load: workloads, the measures of requests, and a simulation of many requests at once."""
