/* How cards are connected, with each other and with CPUs. */
#include "topology.h"
#include "nvml.h"

#include <string.h>

FG_NVML(nvmlDeviceGetTopologyCommonAncestor, (nvmlDevice_t one, nvmlDevice_t other, unsigned *level), {
    struct fg_device *a;
    struct fg_device *b;
    nvmlReturn_t result = fg_nvml_card(one, &a);
    if (result == NVML_SUCCESS)
        result = fg_nvml_card(other, &b);
    if (result == NVML_SUCCESS && !level)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *level = a->ancestor[b->minor];
    return result;
})

FG_NVML(nvmlDeviceGetP2PStatus, (nvmlDevice_t one, nvmlDevice_t other, unsigned index, unsigned *status), {
    struct fg_device *a;
    struct fg_device *b;
    nvmlReturn_t result = fg_nvml_card(one, &a);
    if (result == NVML_SUCCESS)
        result = fg_nvml_card(other, &b);
    if (result == NVML_SUCCESS && (!status || index > 4))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *status = index == 2 && !a->link_count ? 5 : 0;
    return result;
})

/* The number of a link's peer (topology.h). NOT_SUPPORTED behind the card's links, and for a link that is
 * down unless `state` asks for just that. */
static nvmlReturn_t link_peer(nvmlDevice_t device, unsigned link, const void *to, int state, unsigned *peer) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, to && link < FG_MAX_LINKS, &card);
    if (result != NVML_SUCCESS)
        return result;
    *peer = card->link_peer[link];
    return link < card->link_count && (state || *peer != FG_LINK_DOWN) ? NVML_SUCCESS
                                                                       : NVML_ERROR_NOT_SUPPORTED;
}

FG_NVML(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned link, unsigned *active), {
    unsigned peer;
    nvmlReturn_t result = link_peer(device, link, active, 1, &peer);
    if (result == NVML_SUCCESS)
        *active = peer != FG_LINK_DOWN;
    return result;
})

FG_NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2, (nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci), {
    unsigned peer;
    nvmlReturn_t result = link_peer(device, link, pci, 0, &peer);
    if (result != NVML_SUCCESS)
        return result;
    if (peer != FG_LINK_SWITCH)
        return fg_nvml_pci(&fg.shared->devices[peer], pci);
    memset(pci, 0, sizeof *pci);
    pci->bus = 0xC4;
    pci->pciDeviceId = 0x22A310DEu;
    strcpy(pci->busIdLegacy, "0000:C4:00.0");
    strcpy(pci->busId, "00000000:C4:00.0");
    return result;
})

FG_NVML(nvmlDeviceGetNvLinkRemoteDeviceType, (nvmlDevice_t device, unsigned link, unsigned *type), {
    unsigned peer;
    nvmlReturn_t result = link_peer(device, link, type, 0, &peer);
    if (result == NVML_SUCCESS)
        *type = peer == FG_LINK_SWITCH ? 2 : 0;
    return result;
})

FG_NVML(nvmlDeviceGetNvLinkVersion, (nvmlDevice_t device, unsigned link, unsigned *version), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, version != NULL, &card);
    if (result == NVML_SUCCESS && link >= card->link_count)
        return NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        *version = fg_model_of(card)->major >= 9 ? 4 : fg_model_of(card)->major >= 8 ? 3 : 2;
    return result;
})

static nvmlReturn_t affinity(nvmlDevice_t device, unsigned size, unsigned long *set, unsigned long value) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, set && size != 0, &card);
    if (result != NVML_SUCCESS)
        return result;
    memset(set, 0, size * sizeof *set);
    set[0] = value == 0 ? 1ul << card->numa_node : value;
    return NVML_SUCCESS;
}

FG_NVML(nvmlDeviceGetCpuAffinity, (nvmlDevice_t device, unsigned size, unsigned long *set),
        { return affinity(device, size, set, 0xFFFFFFFFul); })
FG_NVML(nvmlDeviceGetMemoryAffinity, (nvmlDevice_t device, unsigned size, unsigned long *set, unsigned scope),
        { return scope > 1 ? NVML_ERROR_INVALID_ARGUMENT : affinity(device, size, set, 0); })
