// `serve` in a build without libmicrohttpd.
#include "commands/commands.h"

void run_serve(const Args&) {
    throw Error(
        "serve: this program was built without libmicrohttpd; `make deps` installs it where the distribution has "
        "it, then run make again");
}
