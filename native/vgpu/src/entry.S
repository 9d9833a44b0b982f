/* dlsym as programs see it. The filter either answers or names the function to jump to; that one then sees the
 * caller's own return address, which RTLD_NEXT and RTLD_DEFAULT need.
 * vg_dlsym_filter(handle, name) returns {pointer, decided} in two registers. */
    .text
    .globl dlsym
    .type dlsym, %function
    .p2align 4
#if defined(__x86_64__)
dlsym:
    .cfi_startproc
    endbr64
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp
    .cfi_adjust_cfa_offset 8
    call vg_dlsym_filter
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    testq %rdx, %rdx
    jne 1f
    jmp *%rax
1:  ret
    .cfi_endproc
#elif defined(__aarch64__)
dlsym:
    .cfi_startproc
    stp x29, x30, [sp, #-32]!
    .cfi_adjust_cfa_offset 32
    .cfi_rel_offset x29, 0
    .cfi_rel_offset x30, 8
    stp x0, x1, [sp, #16]
    mov x29, sp
    bl vg_dlsym_filter
    mov x16, x0
    mov x17, x1
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #32
    .cfi_restore x29
    .cfi_restore x30
    .cfi_adjust_cfa_offset -32
    cbnz x17, 1f
    br x16
1:  mov x0, x16
    ret
    .cfi_endproc
#else
#error "libvgpu is built for x86-64 and aarch64"
#endif
    .size dlsym, . - dlsym
    .section .note.GNU-stack, "", %progbits
