"""Pages that a server shows: each is a folder with `index.html` and what it needs, without a build
step and without content from elsewhere."""

PLAYGROUND = "playground"  # the folder
