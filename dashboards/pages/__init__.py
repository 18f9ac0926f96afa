"""Pages that a server shows. Each is a folder with `index.html` and plain modules, without a build
step and without content from elsewhere."""

# The package and its folder.
PLAYGROUND = (__name__, "playground")
LIVE = (__name__, "live")
