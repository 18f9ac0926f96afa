"""Pages that a server shows. Each is a folder with `index.html` and plain modules, without a build
step and without content from elsewhere; named by the package and the folder."""

PLAYGROUND = (__name__, "playground")
