"""The base of all packages: errors, files, the workspace, messages over sockets."""
