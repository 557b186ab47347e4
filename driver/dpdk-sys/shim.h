/* What is a macro over a thread-local variable, which no binding can express. */
int barewire_rte_errno(void);
unsigned int barewire_rte_lcore_id(void);
