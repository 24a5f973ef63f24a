#!/bin/sh
# Starts the workers: entrypoint.sh app.main --processes 2 --threads 8
#
# The first process of a container adopts every process whose parent has ended, and only it can take their exit codes;
# dramatiq does not, and each of them would stay a zombie for as long as the container lives.  So dumb-init is the
# first.  It hands signals on to dramatiq (and to it alone: dramatiq tells its workers itself), and ends with its code.
set -eu

if [ "$$" -eq 1 ]; then
    exec dumb-init --single-child -- dramatiq "$@"
fi
# Somebody else is the first: docker run --init, or a shared process namespace.
exec dramatiq "$@"
