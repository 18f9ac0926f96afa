"""Pages that a server shows. Each is a folder with `index.html` and plain modules, without a build
step and without content from elsewhere."""

PLAYGROUND = (__name__, "playground")  # the package and its folder
