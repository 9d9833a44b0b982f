#define _GNU_SOURCE
#include "elf_walk.h"

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/auxv.h>

/* What the dynamic section of one object says. */
struct object {
    const char *strings;
    const ElfW(Sym) * symbols;
    const uint32_t *gnu_hash;
    const ElfW(Half) * versions;
    const char *soname;
};

static bool same(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* The loader's list of objects: through the program's own DT_DEBUG, so that nothing has to be called. */
static struct link_map *first_object(void) {
    const ElfW(Phdr) *headers = (const ElfW(Phdr) *)getauxval(AT_PHDR);
    unsigned long count = getauxval(AT_PHNUM);
    if (headers == NULL)
        return NULL;
    uintptr_t bias = 0;
    for (unsigned long i = 0; i < count; i++)
        if (headers[i].p_type == PT_PHDR)
            bias = (uintptr_t)headers - headers[i].p_vaddr;
    for (unsigned long i = 0; i < count; i++) {
        if (headers[i].p_type != PT_DYNAMIC)
            continue;
        for (const ElfW(Dyn) *d = (const ElfW(Dyn) *)(bias + headers[i].p_vaddr); d->d_tag != DT_NULL; d++)
            if (d->d_tag == DT_DEBUG && d->d_un.d_ptr != 0)
                return ((struct r_debug *)d->d_un.d_ptr)->r_map;
    }
    return NULL;
}

static const void *pointer_of(const struct link_map *map, ElfW(Addr) value) {
    return (const void *)(value < map->l_addr ? value + map->l_addr : value);
}

static struct object read_object(const struct link_map *map) {
    struct object object = {0};
    ElfW(Addr) soname = 0;
    bool named = false;
    if (map->l_ld == NULL)
        return object;
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_STRTAB:
            object.strings = pointer_of(map, d->d_un.d_ptr);
            break;
        case DT_SYMTAB:
            object.symbols = pointer_of(map, d->d_un.d_ptr);
            break;
        case DT_GNU_HASH:
            object.gnu_hash = pointer_of(map, d->d_un.d_ptr);
            break;
        case DT_VERSYM:
            object.versions = pointer_of(map, d->d_un.d_ptr);
            break;
        case DT_SONAME:
            soname = d->d_un.d_val;
            named = true;
            break;
        default:
            break;
        }
    }
    if (named && object.strings != NULL)
        object.soname = object.strings + soname;
    return object;
}

/* The symbol in one object; a definition that is not its default version only if there is no other. */
static void *find_symbol(const struct link_map *map, const struct object *object, const char *name) {
    if (object->gnu_hash == NULL || object->symbols == NULL || object->strings == NULL)
        return NULL;
    uint32_t hash = 5381;
    for (const char *p = name; *p != '\0'; p++)
        hash = hash * 33 + (unsigned char)*p;
    uint32_t bucket_count = object->gnu_hash[0], first = object->gnu_hash[1], bloom = object->gnu_hash[2];
    if (bucket_count == 0)
        return NULL;
    const uint32_t *buckets = (const uint32_t *)((const ElfW(Addr) *)(object->gnu_hash + 4) + bloom);
    const uint32_t *chains = buckets + bucket_count;
    uint32_t index = buckets[hash % bucket_count];
    if (index < first)
        return NULL;
    void *hidden = NULL;
    for (;; index++) {
        uint32_t chain = chains[index - first];
        const ElfW(Sym) *symbol = &object->symbols[index];
        if ((chain | 1) == (hash | 1) && symbol->st_shndx != SHN_UNDEF && symbol->st_value != 0 &&
            same(object->strings + symbol->st_name, name)) {
            void *address = (void *)(map->l_addr + symbol->st_value);
            if (object->versions == NULL || (object->versions[index] & 0x8000) == 0)
                return address;
            hidden = address;
        }
        if (chain & 1)
            return hidden;
    }
}

void *vg_libc_function(const char *name) {
    for (const struct link_map *map = first_object(); map != NULL; map = map->l_next) {
        struct object object = read_object(map);
        if (object.soname == NULL ||
            (!same(object.soname, "libc.so.6") && !same(object.soname, "libdl.so.2") &&
             !same(object.soname, "libpthread.so.0")))
            continue;
        void *found = find_symbol(map, &object, name);
        if (found != NULL)
            return found;
    }
    return NULL;
}

/* True if one of the object's segments holds the address. */
static bool holds(const struct link_map *map, const void *address) {
    const ElfW(Ehdr) *file = (const ElfW(Ehdr) *)map->l_addr;
    if (file == NULL || file->e_ident[EI_MAG0] != ELFMAG0 || file->e_ident[EI_MAG1] != ELFMAG1)
        return false;
    const ElfW(Phdr) *headers = (const ElfW(Phdr) *)(map->l_addr + file->e_phoff);
    for (int i = 0; i < file->e_phnum; i++) {
        uintptr_t start = map->l_addr + headers[i].p_vaddr;
        if (headers[i].p_type == PT_LOAD && (uintptr_t)address - start < headers[i].p_memsz)
            return true;
    }
    return false;
}

bool vg_address_in(const void *address, const char *soname) {
    for (const struct link_map *map = first_object(); map != NULL; map = map->l_next) {
        struct object object = read_object(map);
        if (object.soname != NULL && same(object.soname, soname) && holds(map, address))
            return true;
    }
    return false;
}

const char *vg_object_path(const void *address) {
    for (const struct link_map *map = first_object(); map != NULL; map = map->l_next)
        if (map->l_name != NULL && map->l_name[0] == '/' && holds(map, address))
            return map->l_name;
    return NULL;
}
