"""What everything stands on: errors, files, the workspace, messages over sockets."""
