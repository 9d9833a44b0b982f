#include "topology.h"

#include "setup.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One piece of a list: `0-1:4` (both ways), `0>1:4` (one way), `0-s:4` (to a switch). */
struct piece {
    unsigned from, to, number; /* to: FG_LINK_SWITCH for s */
    int one_way;
};

/* A decimal number of at most four digits at *text, which moves behind it. */
static int parse_number(const char **text, unsigned *number) {
    size_t digits = strspn(*text, "0123456789");
    if (digits == 0 || digits > 4)
        return 0;
    *number = (unsigned)strtoul(*text, NULL, 10);
    *text += digits;
    return 1;
}

static int parse_piece(const char *text, uint32_t cards, struct piece *piece) {
    if (!parse_number(&text, &piece->from) || piece->from >= cards || (*text != '-' && *text != '>'))
        return 0;
    piece->one_way = *text++ == '>';
    if (*text == 's') {
        piece->to = FG_LINK_SWITCH;
        text++;
    } else if (!parse_number(&text, &piece->to) || piece->to >= cards || piece->to == piece->from)
        return 0;
    return *text++ == ':' && parse_number(&text, &piece->number) && !*text;
}

/* The pieces of a list, one call of `apply` each; it says whether it could use the piece. */
static void each_piece(struct fg_shared *shared, const char *key, char *list,
                       int (*apply)(struct fg_shared *, const struct piece *)) {
    char *save = NULL;
    for (char *text = strtok_r(list, ", ", &save); text; text = strtok_r(NULL, ", ", &save)) {
        struct piece piece;
        if (!parse_piece(text, shared->device_count, &piece) || !apply(shared, &piece))
            fprintf(stderr, "fakegpu: %s: %s is ignored\n", key, text);
    }
}

/* Links of a card that are in use; they are the first ones. */
static unsigned used_links(const struct fg_device *device) {
    unsigned used = 0;
    while (used < FG_MAX_LINKS && device->link_peer[used] != FG_LINK_DOWN)
        used++;
    return used;
}

static void add_links(struct fg_device *device, unsigned peer, unsigned number) {
    unsigned used = used_links(device);
    memset(device->link_peer + used, (int)peer, number);
    if (used + number > device->link_count)
        device->link_count = (uint8_t)(used + number);
}

static int apply_links(struct fg_shared *shared, const struct piece *piece) {
    struct fg_device *from = &shared->devices[piece->from];
    int back = !piece->one_way && piece->to != FG_LINK_SWITCH;
    if (piece->number > FG_MAX_LINKS - used_links(from) ||
        (back && piece->number > FG_MAX_LINKS - used_links(&shared->devices[piece->to])))
        return 0;
    add_links(from, piece->to, piece->number);
    if (back)
        add_links(&shared->devices[piece->to], piece->from, piece->number);
    return 1;
}

static int apply_ancestor(struct fg_shared *shared, const struct piece *piece) {
    if (piece->to == FG_LINK_SWITCH || piece->number > UINT8_MAX)
        return 0;
    shared->devices[piece->from].ancestor[piece->to] = (uint8_t)piece->number;
    if (!piece->one_way)
        shared->devices[piece->to].ancestor[piece->from] = (uint8_t)piece->number;
    return 1;
}

/* Rounds of a tournament of all cards that have links: in each round every card meets at most one other and
 * gives it a link, until no two cards with free links meet. So both ends know every link, and a card divides
 * its links evenly. */
static void spread_links(struct fg_shared *shared) {
    uint8_t players[FG_MAX_DEVICES + 1];
    unsigned count = 0, idle = 0;
    for (uint32_t i = 0; i < shared->device_count; i++)
        if (shared->devices[i].link_count)
            players[count++] = (uint8_t)i;
    if (count % 2)
        players[count++] = FG_LINK_DOWN; /* whoever meets this one has a free round */
    for (unsigned round = 0; count && idle < count; round++) {
        idle++;
        for (unsigned i = 0; i < count / 2; i++) {
            /* Player 0 stays, the others move around the table. */
            unsigned turn = count - 1, a = i ? 1 + (i - 1 + round) % turn : 0;
            unsigned one = players[a], other = players[1 + (count - 2 - i + round) % turn];
            if (one == FG_LINK_DOWN || other == FG_LINK_DOWN)
                continue;
            struct fg_device *x = &shared->devices[one], *y = &shared->devices[other];
            if (used_links(x) < x->link_count && used_links(y) < y->link_count) {
                add_links(x, other, 1);
                add_links(y, one, 1);
                idle = 0;
            }
        }
    }
}

void fg_topology(struct fg_shared *shared, const char *path) {
    char list[2048];
    for (uint32_t i = 0; i < shared->device_count; i++) {
        struct fg_device *device = &shared->devices[i];
        device->link_count = (uint8_t)fg_model_of(device)->nvlinks;
        memset(device->link_peer, FG_LINK_DOWN, sizeof device->link_peer);
        for (uint32_t j = 0; j < shared->device_count; j++) { /* several switches, one CPU, whole system */
            const struct fg_device *other = &shared->devices[j];
            device->ancestor[j] = i == j                                  ? 0
                                  : i / 2 == j / 2                        ? 20
                                  : device->numa_node == other->numa_node ? 40
                                                                          : 50;
        }
    }
    if (!fg_config_get(path, "FAKEGPU_NVLINKS", list, sizeof list))
        spread_links(shared);
    else if (strcmp(list, "switch") == 0)
        for (uint32_t i = 0; i < shared->device_count; i++)
            add_links(&shared->devices[i], FG_LINK_SWITCH, shared->devices[i].link_count);
    else if (strcmp(list, "none") != 0)
        each_piece(shared, "FAKEGPU_NVLINKS", list, apply_links);
    if (fg_config_get(path, "FAKEGPU_PCIE", list, sizeof list))
        each_piece(shared, "FAKEGPU_PCIE", list, apply_ancestor);
}
