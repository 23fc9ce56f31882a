#!/bin/sh
# The image's health check: asks the server at the first address that it was told to listen on.
#
# usage: healthcheck.sh [PID]    the server's process; 1 unless told, as in a container
#
# A flag of the server wins over its environment, so it does here. 0.0.0.0 and [::] are addresses
# that one can connect to: they lead to the loopback interface.
set -eu

address=$(tr '\0' '\n' <"/proc/${1:-1}/cmdline" |
  sed -n '/^--listen=/{s///p;q};/^--listen$/{n;p;q}')
address=${address:-$TESSERA_LISTEN}
exec tessera --server "${address%%,*}" health
