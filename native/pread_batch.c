/* Batched positional reads: worker threads over preadv(2), behind a plain C ABI for ctypes.
 *
 * A pool reads from descriptors that the caller opened and keeps open. A batch is an array of reads, submitted without
 * waiting; its bytes land straight in the caller's memory. A batch ends when all of its reads ended, never before: once
 * slotpy_batch_wait returned, no thread writes to that memory. Nothing here knows Python, and no file is opened here.
 *
 * Locking: one mutex per pool guards the queue, the counters and every field of a batch except the pieces, each of
 * which belongs to the one worker that claimed it. Batches run in the order of submission.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* preadv */
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define ABI 1 /* slotpy/native.py refuses a library with another number */
#define SHORT_READ (-1) /* the file ended early; positive results are errno values */
#define BLOCK 4096 /* pieces are cut where this divides the file offset, so neighbours share no page */
/* A longer run of bytes is cut, so that idle workers can share it. A virtio disk takes 254 pages a request: 1 MiB would
 * need a second one of two pages and reads big records 3-5 % slower. */
#define PIECE_BYTES (960 << 10)
#define MAX_SHARE 16 /* pieces that one worker claims at a time */
#define STACK_BYTES (256 << 10) /* the default (8 MiB each) counts against an address-space limit */
#ifndef IOV_MAX
#define IOV_MAX 1024
#endif

typedef struct { int64_t file, offset, buffer, start, nbytes; } slotpy_read; /* one row of the caller's array */
typedef struct { int64_t row, offset; } slotpy_failure; /* row where the piece began, first byte not read */
typedef struct { int64_t reads, bytes, busy_ns; } slotpy_counters;

typedef struct { /* bytes that lie together in one file: one preadv, unless the kernel returns fewer */
    int fd, num_iov;
    struct iovec *iov;
    int64_t row, offset, nbytes;
} piece;

typedef struct batch {
    struct batch *next;
    pthread_cond_t ended;
    int64_t num_reads, num_pieces, claimed, unfinished;
    int64_t failed_piece; /* the lowest that failed, or num_pieces */
    int error;
    slotpy_failure failure;
    struct iovec *iov;
    piece pieces[];
} batch;

typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    batch *head, *tail; /* batches with unclaimed pieces */
    int stop, num_idle, num_threads, num_bounces;
    int64_t align; /* 0, or what the files' descriptors (O_DIRECT) ask of offsets, lengths and memory */
    int64_t active, busy_since_ns;
    slotpy_counters counters;
    char *bounce; /* align > 0: PIECE_BYTES for each worker, enough as full pieces end at multiples of BLOCK */
    size_t bounce_bytes;
    int *fds;
    pthread_t threads[];
} pool;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Reads until the iovecs are full. Returns 0, an errno value or SHORT_READ; *done is the bytes that arrived. */
static int read_fully(int fd, struct iovec *iov, int num_iov, int64_t offset, int64_t *done) {
    while (num_iov > 0) {
        off_t at = (off_t)(offset + *done);
        /* pread: 4 KiB reads from a full page cache run 8 % faster than with a preadv of one iovec. */
        ssize_t n = num_iov == 1 ? pread(fd, iov->iov_base, iov->iov_len, at) : preadv(fd, iov, num_iov, at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        if (n == 0) return SHORT_READ;
        *done += n;
        while (num_iov > 0 && (size_t)n >= iov->iov_len) {
            n -= (ssize_t)iov->iov_len;
            iov++, num_iov--;
        }
        if (num_iov > 0) {
            iov->iov_base = (char *)iov->iov_base + n;
            iov->iov_len -= (size_t)n;
        }
    }
    return 0;
}

static int is_aligned(const piece *p, int64_t align) {
    uintptr_t bits = (uintptr_t)p->offset;
    for (int i = 0; i < p->num_iov; i++) bits |= (uintptr_t)p->iov[i].iov_base | p->iov[i].iov_len;
    return (bits & (uintptr_t)(align - 1)) == 0;
}

/* Reads the aligned span around the piece into `bounce` and copies the piece out once all of it is there. */
static int read_through(const piece *p, int64_t align, char *bounce, int64_t *done) {
    int64_t lead = p->offset & (align - 1), want = lead + p->nbytes, got = 0;
    struct iovec span = {bounce, (size_t)((want + align - 1) & ~(align - 1))};
    int error = read_fully(p->fd, &span, 1, p->offset - lead, &got);
    if (got < want) { /* else an error only says that the file ends inside the last block, after the piece */
        *done = got > lead ? got - lead : 0;
        return error;
    }
    const char *from = bounce + lead;
    for (int i = 0; i < p->num_iov; from += p->iov[i].iov_len, i++) memcpy(p->iov[i].iov_base, from, p->iov[i].iov_len);
    *done = p->nbytes;
    return 0;
}

static int read_piece(const pool *s, const piece *p, char *bounce, int64_t *done) {
    *done = 0;
    if (s->align > 0 && !is_aligned(p, s->align)) return read_through(p, s->align, bounce, done);
    return read_fully(p->fd, p->iov, p->num_iov, p->offset, done);
}

static void end_batch(pool *s, batch *b) {
    s->counters.reads += b->num_reads;
    if (--s->active == 0) s->counters.busy_ns += now_ns() - s->busy_since_ns;
    pthread_cond_signal(&b->ended);
}

static void *work(void *arg) {
    pool *s = arg;
    pthread_mutex_lock(&s->lock);
    char *bounce = s->align > 0 ? s->bounce + (size_t)s->num_bounces++ * PIECE_BYTES : NULL;
    for (;;) {
        while (!s->head && !s->stop) {
            s->num_idle++;
            pthread_cond_wait(&s->work, &s->lock);
            s->num_idle--;
        }
        batch *b = s->head;
        if (!b) break;
        int64_t first = b->claimed, left = b->num_pieces - first, done = 0, total = 0;
        int64_t share = left / (2 * s->num_threads); /* many small pieces: one turn of the lock for several */
        int64_t i = first, end = first + (share < 1 ? 1 : share > MAX_SHARE ? MAX_SHARE : share);
        int error = 0;
        b->claimed = end;
        if (end == b->num_pieces) s->head = b->next;
        /* Each worker wakes the next: submit returns in 10-40 us, where waking all from there took up to 1 ms. */
        if (s->head && s->num_idle > 0) pthread_cond_signal(&s->work);
        pthread_mutex_unlock(&s->lock);
        for (; i < end && !error; i++, total += done) error = read_piece(s, &b->pieces[i], bounce, &done);
        pthread_mutex_lock(&s->lock);
        s->counters.bytes += total;
        if (error && --i < b->failed_piece) { /* lower pieces were all claimed, so the lowest failure is found */
            b->failed_piece = i;
            b->error = error;
            b->failure = (slotpy_failure){b->pieces[i].row, b->pieces[i].offset + done};
        }
        if (error && b->claimed < b->num_pieces) { /* spare a failing disk the rest; b is the head, others ended */
            b->unfinished -= b->num_pieces - b->claimed;
            b->claimed = b->num_pieces;
            s->head = b->next;
        }
        b->unfinished -= end - first;
        if (b->unfinished == 0) end_batch(s, b);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Cuts and joins reads into pieces: rows that continue each other in one file become one piece, up to PIECE_BYTES. */
static void plan_pieces(const pool *s, batch *b, const slotpy_read *reads, char *const *buffers) {
    struct iovec *iov = b->iov;
    for (int64_t row = 0; row < b->num_reads; row++) {
        slotpy_read r = reads[row];
        char *to = buffers[r.buffer] + r.start;
        while (r.nbytes > 0) {
            piece *p = b->num_pieces ? &b->pieces[b->num_pieces - 1] : NULL;
            int64_t room = p ? PIECE_BYTES - (p->offset & (BLOCK - 1)) - p->nbytes : 0;
            if (room <= 0 || p->fd != s->fds[r.file] || p->offset + p->nbytes != r.offset || p->num_iov == IOV_MAX) {
                p = &b->pieces[b->num_pieces++];
                *p = (piece){s->fds[r.file], 0, iov, row, r.offset, 0};
                room = PIECE_BYTES - (p->offset & (BLOCK - 1));
            }
            int64_t n = r.nbytes < room ? r.nbytes : room;
            *iov++ = (struct iovec){to, (size_t)n};
            p->num_iov++;
            p->nbytes += n;
            r.offset += n, r.nbytes -= n, to += n;
        }
    }
}

int slotpy_abi(void) { return ABI; }

/* Ends every submitted read, then the threads. Batches must have been waited for. */
void slotpy_pool_close(pool *s) {
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < s->num_threads; i++) pthread_join(s->threads[i], NULL);
    if (s->align > 0) munmap(s->bounce, s->bounce_bytes);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    free(s->fds);
    free(s);
}

/* Starts the workers, with all signals blocked: they are the caller's. Returns 0 or an errno value. */
int slotpy_pool_open(const int *fds, int num_files, int num_threads, int64_t align, pool **out) {
    pool *s = calloc(1, sizeof *s + (size_t)num_threads * sizeof *s->threads);
    int *own = malloc((size_t)(num_files + 1) * sizeof *own);
    if (!s || !own) {
        free(s), free(own);
        return ENOMEM;
    }
    memcpy(own, fds, (size_t)num_files * sizeof *own);
    s->fds = own, s->align = align;
    if (align > 0) { /* from mmap: aligned, and workers that never call malloc get no arenas of their own */
        s->bounce_bytes = (size_t)num_threads * PIECE_BYTES;
        s->bounce = mmap(NULL, s->bounce_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (s->bounce == MAP_FAILED) {
            free(own), free(s);
            return ENOMEM;
        }
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_attr_t attr;
    sigset_t all, before;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    while (!error && s->num_threads < num_threads) {
        error = pthread_create(&s->threads[s->num_threads], &attr, work, s);
        if (!error) s->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (error) slotpy_pool_close(s);
    else *out = s;
    return error;
}

/* Queues reads[num_reads] into buffers[]; both arrays may go when this returns, the memory behind them not before
 * slotpy_batch_wait. Indexes and ranges are the caller's to check. Returns NULL when memory is out. */
batch *slotpy_batch_submit(pool *s, const slotpy_read *reads, int64_t num_reads, char *const *buffers) {
    size_t most = 0;
    for (int64_t row = 0; row < num_reads; row++) most += (size_t)(reads[row].nbytes / (PIECE_BYTES - BLOCK)) + 2;
    batch *b = calloc(1, sizeof *b + most * sizeof *b->pieces);
    struct iovec *iov = malloc((most + 1) * sizeof *iov);
    if (!b || !iov) {
        free(b), free(iov);
        return NULL;
    }
    pthread_cond_init(&b->ended, NULL);
    b->iov = iov, b->num_reads = num_reads;
    plan_pieces(s, b, reads, buffers);
    b->unfinished = b->failed_piece = b->num_pieces;
    pthread_mutex_lock(&s->lock);
    if (s->active++ == 0) s->busy_since_ns = now_ns();
    if (b->num_pieces == 0) {
        end_batch(s, b);
    } else {
        if (s->head) s->tail->next = b;
        else s->head = b;
        s->tail = b;
        pthread_cond_signal(&s->work);
    }
    pthread_mutex_unlock(&s->lock);
    return b;
}

/* Waits until every read of the batch ended and frees it. Returns 0, or what the lowest failing read met (an errno
 * value or SHORT_READ) with its place in *failure. */
int slotpy_batch_wait(pool *s, batch *b, slotpy_failure *failure) {
    pthread_mutex_lock(&s->lock);
    while (b->unfinished > 0) pthread_cond_wait(&b->ended, &s->lock);
    pthread_mutex_unlock(&s->lock);
    int error = b->error;
    *failure = b->failure;
    pthread_cond_destroy(&b->ended);
    free(b->iov);
    free(b);
    return error;
}

/* Counts since the pool was opened; busy_ns is wall time with at least one batch unfinished. */
void slotpy_pool_counters(pool *s, slotpy_counters *out) {
    pthread_mutex_lock(&s->lock);
    *out = s->counters;
    if (s->active > 0) out->busy_ns += now_ns() - s->busy_since_ns;
    pthread_mutex_unlock(&s->lock);
}
