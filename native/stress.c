/* Hammers the reader from several threads, for sanitizers and valgrind; README.md has the commands. Exits 1 on a wrong
 * byte. Reads a file of 64-bit words that each hold their own index.
 */
#include "pread_batch.c"
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>

enum { WORDS = 1 << 20, THREADS = 4, ROUNDS = 60, ROWS = 40, SLOT = 9000 };

static pool *shared;
static atomic_int wrong;

static void *submitter(void *arg) {
    unsigned seed = (unsigned)(uintptr_t)arg;
    char *memory = malloc(ROWS * SLOT);
    for (int round = 0; round < ROUNDS; round++) {
        slotpy_read reads[ROWS];
        slotpy_failure failure;
        for (int i = 0; i < ROWS; i++) {
            int joins = i > 0 && rand_r(&seed) % 3 == 0; /* this row goes on where the one before ended */
            int64_t offset = joins ? reads[i - 1].offset + reads[i - 1].nbytes : rand_r(&seed) % (WORDS * 8 - ROWS * SLOT);
            reads[i] = (slotpy_read){rand_r(&seed) % 2, offset, 0, (int64_t)i * SLOT, rand_r(&seed) % SLOT};
        }
        int fails = round % 10 == 9; /* file 2 is open for writing only */
        if (fails) reads[ROWS / 2].file = 2, reads[ROWS / 2].nbytes = 1;
        batch *b = slotpy_batch_submit(shared, reads, ROWS, &memory);
        slotpy_counters counters;
        slotpy_pool_counters(shared, &counters);
        int error = slotpy_batch_wait(shared, b, &failure);
        if (error != (fails ? EBADF : 0) || (fails && failure.row != ROWS / 2)) wrong++;
        for (int i = 0; i < ROWS && !fails; i++) {
            for (int64_t at = 0; at < reads[i].nbytes; at++) {
                int64_t place = reads[i].offset + at, word = place / 8;
                if (memory[i * SLOT + at] != ((char *)&word)[place % 8]) wrong++;
            }
        }
    }
    free(memory);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: %s FILE (made, then read)\n", argv[0]), 2;
    int64_t *words = malloc(WORDS * sizeof *words);
    for (int64_t i = 0; i < WORDS; i++) words[i] = i;
    int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, words, WORDS * sizeof *words) != (ssize_t)(WORDS * sizeof *words)) return perror(argv[1]), 2;
    free(words);
    int fds[] = {fd, open(argv[1], O_RDONLY), open(argv[1], O_WRONLY)};
    for (int64_t align = 0; align <= 512; align += 512) { /* 512: through bounce memory, also without O_DIRECT */
        if (slotpy_pool_open(fds, 3, 5, align, &shared) != 0) return perror("slotpy_pool_open"), 2;
        pthread_t threads[THREADS];
        for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, submitter, (void *)(i + 1));
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        slotpy_pool_close(shared);
    }
    for (int i = 0; i < 3; i++) close(fds[i]);
    printf("%d wrong\n", wrong);
    return wrong != 0;
}
