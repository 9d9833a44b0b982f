/* A statically linked program: the preload does not reach it. */
int main(void) {
    return 5;
}
