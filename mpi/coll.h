/*
 * Barewire's collectives under MPI's, as far as they are alike under every MPI: groups of
 * fi_collective(3), which calls they take, and how a call is made. A *face* has the MPI call this:
 * ompi4.c is a component of Open MPI 4.1, pmpi.c a library of MPI's profiling interface. Each is
 * compiled with the headers of its MPI and with coll.c.
 *
 * A communicator of two or more members gets a group at its first call: its creation stays as
 * cheap as it was, also for MPI_Comm_idup, whose creation must not wait, and a communicator that
 * makes no collective takes none of the 32 groups that go through memory. The members agree on it
 * by two calls of the MPI's own: who has no barewire, or cannot join, keeps all of them from it,
 * and nobody joins while another still computes.
 *
 * Which calls are taken must be found alike by all members. So it is decided by what MPI has alike
 * at all of them: call, bytes of a block, operation and type of a reduction. Layouts are not: who
 * has another one than its peers packs. All else is the MPI's own: operations and types of the
 * user in reductions, MINLOC and MAXLOC, long blocks, intercommunicators, vectors of counts, and
 * neighbours.
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

/* Looks at our own queue for each turn of the MPI's progress, which asks every transport. */
#define POLLS 8

/*
 * Requests of a communicator that are under way at once. The endpoint has room for 1,024 calls: so
 * others find room while nobody answers these.
 */
#define UNDER_WAY 64

/* Where a member is, from member to member. All bytes count. */
struct card {
	/* Of `name`; 0 if it has no barewire. */
	uint32_t len;
	/* Number of the group at this member. */
	uint32_t serial;
	/* As `coll.max_bytes`. */
	int64_t max_bytes;
	char name[64];
};

enum state { UNTRIED, JOINED, DECLINED, FAILED };

/* What is kept of a communicator. All zero but for `rank` and `size` at first. */
struct group {
	int rank, size;
	enum state state;
	/* Its first error was said. */
	bool told;
	struct fid_mc *mc;
	fi_addr_t addr;
	/* Addresses by rank. */
	fi_addr_t *members;
	/* How the join has ended: 0 not yet, 1 well, else a negative error. */
	int join_end;
	/* For blocks of calls that block, which are packed or must lie apart. */
	char *temp;
	size_t temp_len;
	/* Requests that are under way. */
	int under_way;
	/* Requests that wait for room, in the order of their calls. Under the lock. */
	struct request *first, **last;
	/* Of those with such requests. */
	struct group *late;
};

/* A call as the program makes it. What its kind has not got is zero. */
struct wanted {
	enum fi_collective_op kind;
	/* Source and result. A reduction has one type and count, those of the result. */
	const void *sbuf;
	int64_t scount;
	MPI_Datatype stype;
	/* Of a broadcast, at the root as well. */
	void *rbuf;
	int64_t rcount;
	MPI_Datatype rtype;
	MPI_Op op;
	int root;
};

/* A call of barewire's. */
struct call {
	enum fi_collective_op kind;
	fi_addr_t root;
	enum fi_datatype type;
	enum fi_op op;
	/* Elements of a block. */
	size_t count;
	void *in, *out;
	/* 0 under way, 1 done, else a negative error of libfabric. */
	int end;
	/* Called instead of setting `end`, with the same; NULL in a call that blocks. */
	void (*ended)(struct call *call, int end);
};

/* Blocks of a call as MPI has them. */
struct part {
	char *buf;
	/* 0 if what comes is not kept. */
	size_t count;
	MPI_Datatype type;
	/* Bytes, without gaps. */
	size_t len;
	/* Bytes before the first of them, if there are no gaps. */
	ptrdiff_t before;
	/* Has gaps, or overlaps the other part. */
	bool apart;
};

/* How a call is made. */
struct plan {
	struct call call;
	struct part from, to;
};

/* A call that does not block. It is in a face's own record of the MPI's request. */
struct request {
	/* Held until the end: the communicator may be freed before. */
	struct group *group;
	struct plan plan;
	/* As the group's, for this call. */
	char *temp;
	/* Of those that wait for room, or are not in use. */
	struct request *next;
};

/* What becomes of a call. */
enum answer {
	/* The MPI makes it. */
	LEFT,
	/* It has no elements and is over. */
	EMPTY,
	/* It is planned. */
	OURS,
	/* Memory is short, and the others go on. */
	NO_MEMORY,
};

/* Reductions that MPI has of a type. */
enum { ARITHMETIC = 1, ORDER = 2, LOGIC = 4, BITS = 8, EVERY = 15 };

/* Libfabric's type of an MPI's. */
/* Types of libfabric 2.0, which older headers lack. */
enum { FLOAT16 = 16, BFLOAT16 = 17 };

struct reduced {
	/* One more than it, or 0 if there is none. */
	unsigned char type;
	/* Kinds of operations that it has. */
	unsigned char kinds;
};

/* What a process has once. */
struct coll {
	/* Set by the face before the first call: threads call at once. */
	bool threads;
	/* Bytes of a block at most, but for types that are ours alone; alike at all members. */
	int max_bytes;
	/* Calls that barewire has made. */
	unsigned long calls;
};
extern struct coll coll;

/* ---- For a face ---- */

/*
 * What becomes of a call on a communicator. If it may wait, the first makes the group. Returns OURS
 * with `p` filled in.
 */
enum answer coll_plan(struct group *g, MPI_Comm comm, const struct wanted *w, bool may_wait,
		      struct plan *p);

/*
 * Makes a call and waits for its end, behind all that were begun before. Returns MPI_SUCCESS or an
 * error of MPI's.
 */
int coll_run(struct group *g, struct plan *p);

/*
 * Begins a call, which ends with face_ended, perhaps before this returns. Returns MPI_SUCCESS, or
 * an error of MPI's; then it has not begun.
 */
int coll_begin(struct group *g, const struct plan *p, struct request *r);

/*
 * Ends what has completed, and posts what has waited for room. Returns how many have ended. The
 * MPI's progress calls it in every turn, as soon as face_opened was called.
 */
int coll_progress(void);

/*
 * Requests that are not in use: takes one, or NULL; and gives one back. They stay memory, since
 * another thread may look at one that has ended.
 */
struct request *coll_spare(void);
void coll_put_back(struct request *r);

/* Gives up what a communicator has, but for `g` itself. */
void coll_forget(struct group *g);

/* Closes barewire, when all groups are given up. */
void coll_close(void);

/* Nothing is locked where only one thread calls. */
void coll_lock(void);
void coll_unlock(void);

/* ---- From a face ---- */

/* Makes the MPI's progress. A queue of ours that is read in vain leaves the processor to others. */
void face_progress(void);

/* The MPI's own calls, by which members agree. They return MPI_SUCCESS or an error. */
int face_allgather(struct group *g, MPI_Comm comm, const void *one, void *all, int len);
int face_minimum(struct group *g, MPI_Comm comm, const int *one, int *least);

/* Barewire was opened in this process. */
void face_opened(void);

/* A group's memory stays until it is released as often as it was held. */
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

struct reduced face_reduced(MPI_Datatype type);

/* Keeps a type that may be freed while a call is under way. MPI_DATATYPE_NULL if memory is short. */
MPI_Datatype face_keep(MPI_Datatype type);
void face_let_go(MPI_Datatype kept);

/* Copies a part to bytes without gaps, and from them. */
void face_pack(const struct part *from, void *to);
void face_unpack(const void *from, const struct part *to);

#endif
