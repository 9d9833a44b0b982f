/* How the cards of the machine are connected: NVLinks and the parts of the PCIe tree that they share. */
#ifndef FAKEGPU_TOPOLOGY_H
#define FAKEGPU_TOPOLOGY_H

#include "state.h"

enum { FG_LINK_SWITCH = 0xFE, FG_LINK_DOWN = 0xFF };

/* Fill link_count, link_peer and ancestor of all cards, whose other fields are set, from the settings in
 * `path`. Bad pieces are reported on stderr and left out. */
void fg_topology(struct fg_shared *shared, const char *path);

#endif
