/*
 * MPI collectives over barewire's, the part that is common to all MPIs: groups of fi_collective(3),
 * which calls they take, and how a call is made. A *face* is the part of one MPI, which calls this:
 * ompi4.c is a component of Open MPI 4.1, pmpi.c a library of MPI's profiling interface. Each is
 * compiled with the headers of its MPI and with coll.c.
 *
 * A communicator of two or more members gets a group at its first collective. So the creation of a
 * communicator costs nothing more, also by MPI_Comm_idup, which must not block, and a communicator
 * without collectives takes none of the 32 groups that go through shared memory. The members agree
 * on the group by two collectives of the MPI itself: a member without barewire, or one that cannot
 * join, keeps all of them from it, and no member joins while another still computes.
 *
 * All members must take the same calls. So the decision depends only on arguments that MPI requires
 * to be equal at all of them: call, bytes of a block, operation and type of a reduction. Layouts of
 * data may differ: a member with a layout of its own packs. All other calls are left to the MPI:
 * reductions with user-defined operations and types, MINLOC and MAXLOC, long blocks,
 * intercommunicators, vector variants, and neighbourhood collectives.
 */
#ifndef BAREWIRE_MPI_COLL_H
#define BAREWIRE_MPI_COLL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <rdma/fabric.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include "mpi.h"

/* Polls of barewire's queue for each turn of the MPI's progress, which polls every transport. */
#define POLLS 8

/*
 * Most requests in flight of a communicator. The endpoint has room for 1,024 calls, so members of a
 * communicator that do not answer do not block others.
 */
#define IN_FLIGHT 64

/* Address of a member, exchanged between members. All bytes are compared. */
struct member {
	/* Length of `name`; 0 if the member has no barewire. */
	uint32_t len;
	/* Number of the group at this member. */
	uint32_t serial;
	/* `coll.max_bytes` of the member. */
	int64_t max_bytes;
	char name[64];
};

enum state { UNTRIED, JOINED, DECLINED, FAILED };

/* State of a communicator. All zero but for `rank` and `size` at first. */
struct group {
	int rank, size;
	enum state state;
	/* Its first error was printed. */
	bool error_printed;
	struct fid_mc *mc;
	fi_addr_t addr;
	/* Addresses by rank. */
	fi_addr_t *members;
	/* Result of the join: 0 pending, 1 joined, else a negative error. */
	int join_end;
	/* Buffer of blocking calls, for packed or separate blocks. */
	char *temp;
	size_t temp_len;
	/* Number of requests in flight. */
	int in_flight;
	/* Requests that wait for room, in the order of their calls. Under the lock. */
	struct request *first, **last;
	/* Next group with waiting requests. */
	struct group *late;
};

/* Arguments of a call of the program. Arguments that its kind does not have are zero. */
struct mpi_call {
	enum fi_collective_op kind;
	/* Source and result. A reduction has one type and count, those of the result. */
	const void *sbuf;
	int64_t scount;
	MPI_Datatype stype;
	/* Also the buffer of a broadcast, at all members. */
	void *rbuf;
	int64_t rcount;
	MPI_Datatype rtype;
	MPI_Op op;
	int root;
};

/* A barewire collective. */
struct call {
	enum fi_collective_op kind;
	fi_addr_t root;
	enum fi_datatype type;
	enum fi_op op;
	/* Elements of a block. */
	size_t count;
	void *in, *out;
	/* 0 in flight, 1 done, else a negative error of libfabric. */
	int end;
	/* Called with the result instead of setting `end`; NULL in a blocking call. */
	void (*ended)(struct call *call, int end);
};

/* Source or result blocks of a call, in MPI's terms. */
struct part {
	char *buf;
	/* 0 if the received data is dropped. */
	size_t count;
	MPI_Datatype type;
	/* Bytes, without gaps. */
	size_t len;
	/* Offset of the first byte, if there are no gaps. */
	ptrdiff_t before;
	/* Needs a separate buffer: has gaps, or overlaps the other part. */
	bool apart;
};

/* A planned call. */
struct plan {
	struct call call;
	struct part from, to;
};

/* A nonblocking call, part of the face's record of the MPI request. */
struct request {
	/* Referenced until the end: the communicator may be freed before. */
	struct group *group;
	struct plan plan;
	/* Buffer of this call, as that of the group. */
	char *temp;
	/* Next in the list of waiting or of free requests. */
	struct request *next;
};

/* Decision about a call. */
enum answer {
	/* The call is left to the MPI. */
	LEFT,
	/* The call has no elements and is complete. */
	EMPTY,
	/* Barewire takes the call, and it is planned. */
	OURS,
	/* Out of memory, while the other members go on. */
	NO_MEMORY,
};

/* Classes of reductions that MPI defines for a type. */
enum { ARITHMETIC = 1, ORDER = 2, LOGIC = 4, BITS = 8, EVERY = 15 };

/* Libfabric's type of an MPI's. */
/* Types of libfabric 2.0, which older headers lack. */
enum { FLOAT16 = 16, BFLOAT16 = 17 };

struct reduction_type {
	/* libfabric's type plus one; 0 for none. */
	unsigned char type;
	/* Classes of its operations. */
	unsigned char kinds;
};

/* State of the process. */
struct coll {
	/* Set by the face before the first call: MPI_THREAD_MULTIPLE. */
	bool threads;
	/* Longest block, bytes, except for types that only barewire has; equal at all members. */
	int max_bytes;
	/* Number of calls that barewire has taken. */
	unsigned long calls;
};
extern struct coll coll;

/* ---- Called by a face ---- */

/*
 * Decides about a call on a communicator. The first call with `may_wait` makes the group. Fills in
 * `p` if it returns OURS.
 */
enum answer coll_plan(struct group *g, MPI_Comm comm, const struct mpi_call *w, bool may_wait,
		      struct plan *p);

/*
 * Makes a call, after all that were begun before, and waits for its end. Returns MPI_SUCCESS or an
 * MPI error.
 */
int coll_run(struct group *g, struct plan *p);

/*
 * Begins a call, which ends with face_ended, possibly before this returns. Returns MPI_SUCCESS, or
 * an MPI error; then the call has not begun.
 */
int coll_begin(struct group *g, const struct plan *p, struct request *r);

/*
 * Ends completed calls, and posts requests that have waited for room. Returns the number of ended
 * calls. The MPI's progress calls it in every turn, after face_opened was called.
 */
int coll_progress(void);

/*
 * The pool of free requests: takes one, or NULL; and returns one. Requests are never freed, since
 * another thread may read one that has ended.
 */
struct request *coll_spare(void);
void coll_put_back(struct request *r);

/* Frees the resources of a communicator, except `g` itself. */
void coll_forget(struct group *g);

/* Closes barewire, after all groups are freed. */
void coll_close(void);

/* No-ops without MPI_THREAD_MULTIPLE. */
void coll_lock(void);
void coll_unlock(void);

/* ---- Provided by a face ---- */

/* Turns the MPI's progress. Empty reads of barewire's queue yield the processor. */
void face_progress(void);

/* Collectives of the MPI itself, by which members agree. Return MPI_SUCCESS or an error. */
int face_allgather(struct group *g, MPI_Comm comm, const void *one, void *all, int len);
int face_minimum(struct group *g, MPI_Comm comm, const int *one, int *least);

/* Called when barewire was opened in this process. */
void face_opened(void);

/* Reference count of a group's memory. */
void face_hold(struct group *g);
void face_release(struct group *g);

/* A call that was begun has ended, with MPI_SUCCESS or an error of MPI's. */
void face_ended(struct request *r, int err);

/* Says something if the user wants to hear of this level; 0 always. */
void face_say(int level, const char *what);

/* Bytes of a type without its gaps. SIZE_MAX if it has none. */
size_t face_size(MPI_Datatype type);
ptrdiff_t face_extent(MPI_Datatype type);

/* Whether so many elements have no gap and are in order, and bytes before the first of them. */
bool face_is_plain(MPI_Datatype type, size_t count, ptrdiff_t *before);

struct reduction_type face_reduced(MPI_Datatype type);

/* Keeps a type that may be freed while a call is under way. MPI_DATATYPE_NULL if memory is short. */
MPI_Datatype face_keep(MPI_Datatype type);
void face_let_go(MPI_Datatype kept);

/* Copies a part to bytes without gaps, and from them. */
void face_pack(const struct part *from, void *to);
void face_unpack(const void *from, const struct part *to);

#endif
